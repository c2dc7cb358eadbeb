"""The operators: from inputs to the DataFrames of outputs. Nothing runs here but users' code."""
