"""How each database is asked: the programs that turn Ops into statements, and the statements' files."""
