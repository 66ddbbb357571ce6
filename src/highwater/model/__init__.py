"""Models as their ``config.json`` tells them: shapes, families, weight files, footprints."""
