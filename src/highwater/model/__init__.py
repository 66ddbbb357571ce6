"""Models as their ``config.json`` describes them: shapes, families, weight files, held bytes."""
