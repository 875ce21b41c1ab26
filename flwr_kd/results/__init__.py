"""Results: their form, their files, where they come from, and their table."""
