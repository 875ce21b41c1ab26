"""Pictures of results, one module for each."""
