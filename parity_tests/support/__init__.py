"""What several rooms of tests use: models and reports made for them, a browser, tables of bad calls."""
