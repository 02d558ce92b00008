"""The payments service of the demo: FastAPI, its business rows beside Semel's records, every write declared."""
