"""What all tests share: worker processes are forked from one that has their imports."""

import fork_server

fork_server.install()
