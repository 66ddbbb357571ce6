"""Control plane: text, tables, charts and HTML pages, and the data gathered for them."""
