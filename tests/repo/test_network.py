import socket

import pytest


def test_the_network_is_out_of_reach():
    with pytest.raises(RuntimeError, match="asked for the network"): socket.create_connection(("192.0.2.1", 80), timeout=1)
