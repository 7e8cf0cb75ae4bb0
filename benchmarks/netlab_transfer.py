"""Sender and receiver of a TCP transfer; started by `Lab.measure_bandwidth`.

    python netlab_transfer.py receive ADDRESS SKIPPED_SECONDS SECONDS
    python netlab_transfer.py send ADDRESS PORT

The receiver prints its port first, and the received bits per second at the end. Only small modules
of the standard library are imported, so that the start is fast.
"""

from __future__ import annotations

import socket
import sys
import time


def receive(address: str, skipped_seconds: float, seconds: float) -> None:
    """Measure the received bits per second for `seconds`, after skipping `skipped_seconds`."""
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        link, _ = server.accept()
    buffer, began, count = bytearray(1 << 20), None, 0
    first = time.monotonic() + skipped_seconds
    while size := link.recv_into(buffer):
        now = time.monotonic()
        if began is None:
            began = now if now >= first else None
            continue
        count += size
        if now - began >= seconds:
            print(8 * count / (now - began))
            return


def send(address: str, port: int) -> None:
    """Send until the receiver closes the connection."""
    data = bytes(1 << 18)
    with socket.create_connection((address, port)) as link:
        try:
            while True:
                link.sendall(data)
        except OSError:
            return


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
    else:
        send(sys.argv[2], int(sys.argv[3]))
