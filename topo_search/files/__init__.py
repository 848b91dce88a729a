"""Reading and writing the project's files: schemas, hostile-input checks, atomic writes. No torch."""
