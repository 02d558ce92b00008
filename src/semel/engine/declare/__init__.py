"""How a program's function becomes a call: its name, its key, its fingerprint, its arguments."""
