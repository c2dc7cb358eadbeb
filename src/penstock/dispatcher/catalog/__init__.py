"""Every dataset as a table of an Iceberg REST catalog, over what is published; for reading."""
