"""An app whose clients fail where a test says so."""
