"""One module per database: the programs that turn Ops into statements, and the files of these statements."""
