"""The bridge from the network of a command to a Unix socket outside: it forwards TCP connections in both directions."""

from __future__ import annotations

import contextlib
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector
from socket import AF_INET, AF_UNIX, SHUT_WR, SO_REUSEADDR, SOL_SOCKET, socket

_MAX_CONNECTIONS = 256  # at the same time. Further ones wait in the queue of the kernel
_CHUNK = 1 << 16  # bytes that a direction of a connection reads before it writes them


class _Side:
    """One end of a connection, and what is to be sent to it."""

    def __init__(self, connected: socket):
        self.socket = connected
        self.other: _Side = self
        self.waiting = memoryview(b"")  # a side is only read when nothing waits for the other one
        self.no_more = False  # the other side has ended its stream
        self.events = 0  # that the selector looks for


class Bridge:
    """Forwards connections to a port of 127.0.0.1 in this network namespace. A loop calls `handle` and `retry`."""

    def __init__(self, selector: BaseSelector, port: int, target: str):
        self._selector, self._target = selector, target
        self._n_connections = 0
        self._listener = socket(AF_INET)
        self._listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._listens = False
        self.retry()

    def retry(self) -> None:
        """Accept connections again, after the socket outside had no room for another one."""
        self._listen(self._n_connections < _MAX_CONNECTIONS)

    def handle(self, side: _Side | None, events: int) -> None:
        """Do what the selector found possible for a side, or for the listening socket."""
        if side is None:
            return self._connect()
        if side.socket.fileno() < 0:  # closed since the selector looked
            return
        try:
            if events & EVENT_WRITE:
                self._send(side)
            if events & EVENT_READ:
                self._receive(side)
        except BlockingIOError:
            pass
        except OSError:
            self._close(side)

    def _listen(self, listens: bool) -> None:
        if listens and not self._listens:
            self._selector.register(self._listener, EVENT_READ, None)
        elif self._listens and not listens:
            self._selector.unregister(self._listener)
        self._listens = listens

    def _connect(self) -> None:
        outer = socket(AF_UNIX)
        outer.setblocking(False)
        inner = None
        try:
            outer.connect(self._target)
            inner, _ = self._listener.accept()
        except BlockingIOError:
            outer.close()
            return self._listen(False)  # the queue of the socket outside is full
        except OSError:
            outer.close()
            with contextlib.suppress(OSError):
                self._listener.accept()[0].close()  # nobody listens outside
            return
        inner.setblocking(False)
        first, second = _Side(inner), _Side(outer)
        first.other, second.other = second, first
        self._n_connections += 1
        self._listen(self._n_connections < _MAX_CONNECTIONS)
        self._look_for(first)
        self._look_for(second)

    def _receive(self, side: _Side) -> None:
        other = side.other
        data = side.socket.recv(_CHUNK)
        other.waiting, other.no_more = memoryview(data), not data
        with contextlib.suppress(BlockingIOError):
            return self._send(other)
        self._look_for(side)
        self._look_for(other)

    def _send(self, side: _Side) -> None:
        if side.waiting:
            side.waiting = side.waiting[side.socket.send(side.waiting) :]
        if side.no_more and not side.waiting:
            with contextlib.suppress(OSError):
                side.socket.shutdown(SHUT_WR)
            if side.other.no_more and not side.other.waiting:
                return self._close(side)
        self._look_for(side)
        self._look_for(side.other)

    def _look_for(self, side: _Side) -> None:
        reads = not side.other.waiting and not side.other.no_more
        events = EVENT_READ * reads | EVENT_WRITE * bool(side.waiting)
        if events == side.events:
            return
        if events and side.events:
            self._selector.modify(side.socket, events, side)
        elif events:
            self._selector.register(side.socket, events, side)
        elif side.events:
            self._selector.unregister(side.socket)
        side.events = events

    def _close(self, side: _Side) -> None:
        for each in (side, side.other):
            if each.events:
                self._selector.unregister(each.socket)
            each.socket.close()
        self._n_connections -= 1
        self.retry()
