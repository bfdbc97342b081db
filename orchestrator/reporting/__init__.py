"""Reports in Markdown and HTML, tables, and notebooks' frames."""
