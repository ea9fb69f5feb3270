"""Whole models judged block by block: `walk.check_model` is the way in, `report.ModelReport` comes out."""
