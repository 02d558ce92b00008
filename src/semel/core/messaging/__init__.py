"""Messages, pure: what they are, and what a relay and a consumer do with them."""
