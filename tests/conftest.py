"""No test may ask for the network: whatever is downloaded by accident fails at once, and says so."""
import ipaddress
import socket

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_network():
    connect = socket.socket.connect

    def local_only(self, address):
        if self.family not in (socket.AF_INET, socket.AF_INET6): return connect(self, address)
        try: ours = ipaddress.ip_address(address[0]).is_loopback
        except ValueError: ours = address[0] == "localhost"
        if not ours: raise RuntimeError(f"a test asked for the network: {address}")
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_only)
        yield
