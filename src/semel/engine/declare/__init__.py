"""How a user's function becomes a call: its name, its key, its fingerprint, its inputs."""
