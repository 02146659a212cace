"""CoLA (arXiv 2502.10940)."""
