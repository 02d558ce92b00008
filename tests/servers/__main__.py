"""`python -m tests.servers [kind …]`: install the servers that the tests use, all kinds or the named ones."""

import sys

from tests.servers.install import main

sys.exit(main(sys.argv[1:]))
