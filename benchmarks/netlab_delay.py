"""A switch that delivers each Ethernet frame some time after it arrived, for `netlab`.

    python netlab_delay.py SECONDS INTERFACE INTERFACE [INTERFACE ...]

Needs root. Prints "ready", and runs until killed. Each interface leads to one host. Frames are
forwarded by the address that they are sent to, and to all other interfaces while it is not known.
They keep the header by which Linux describes segmentation and checksums that are left to the
hardware, so that connections are as fast as over a bridge.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

ALL_PROTOCOLS = 3  # ETH_P_ALL of linux/if_ether.h
# Of linux/if_packet.h.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # of asm-generic/socket.h
OFFLOAD_HEADER_BYTES = 10
ADDRESS_BYTES = 6
MAX_FRAME_BYTES = 1 << 17
FRAMES_AT_ONCE = 64  # from one interface, before others have their turn
BUFFER_BYTES = 64 << 20


class DelayingSwitch:
    """Connects interfaces; see the module's text.

    Args:
        delay: seconds.
        interfaces: names.
    """

    def __init__(self, delay: float, interfaces: Sequence[str]) -> None:
        self._delay = delay
        self._ports = [_open(name) for name in interfaces]
        self._port_of_address: dict[bytes, socket.socket] = {}
        # In the order of their times, as all are delayed alike.
        self._waiting: deque[tuple[float, bytes, list[socket.socket]]] = deque()

    def run(self) -> None:
        """Forward frames for ever."""
        while True:
            wait = self._waiting[0][0] - time.monotonic() if self._waiting else None
            ready, _, _ = select.select(self._ports, [], [], wait and max(0.0, wait))
            for port in ready:
                self._receive(port)
            self._send_due()

    def _receive(self, port: socket.socket) -> None:
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = port.recv(MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            due = time.monotonic() + self._delay
            target, source = (
                frame[OFFLOAD_HEADER_BYTES + place * ADDRESS_BYTES :][:ADDRESS_BYTES]
                for place in range(2)
            )
            self._port_of_address[source] = port
            known = self._port_of_address.get(target)
            ports = [each for each in self._ports if each is not port] if known is None else [known]
            self._waiting.append((due, frame, ports))

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, frame, ports = self._waiting.popleft()
            for port in ports:
                with suppress(OSError):  # its buffer is full: a switch drops the frame
                    port.send(frame)


def _open(interface: str) -> socket.socket:
    # Without a protocol it receives nothing before `bind`, not even of other interfaces.
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    port.bind((interface, ALL_PROTOCOLS))
    port.setblocking(False)
    return port


if __name__ == "__main__":
    switch = DelayingSwitch(float(sys.argv[1]), sys.argv[2:])
    print("ready", flush=True)
    switch.run()
