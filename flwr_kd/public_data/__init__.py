"""Exchange of soft predictions on public samples."""
