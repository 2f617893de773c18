"""``python -m crossrl.cluster.child CALLS LIFELINE``: the process of a local worker. Not for users.

CALLS: descriptor of the connection on which calls come. LIFELINE: descriptor of a pipe that its parent holds open; when
that ends, so does this process, whatever it is doing.
"""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Connection
from queue import Queue
from typing import Any

from crossrl.cluster.host import Answer, Host


def main(calls: int, lifeline: int) -> None:
    for descriptor in (calls, lifeline):
        os.set_inheritable(descriptor, False)  # a process of ours must not keep them open
    threading.Thread(target=_die_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    connection, sending = Connection(calls), threading.Lock()

    def send(number: int, what: str, value: Any) -> None:
        with sending:
            connection.send((number, what, value))

    host, queue = Host(), Queue[Any]()
    threading.Thread(target=_read, args=(connection, host, queue, send), name="calls", daemon=True).start()
    while (call := queue.get()) is not None:
        number, method, args, kwargs, progress = call
        if method == "":
            send(number, "answer", host.make(*args))
            continue
        report = (lambda done, total, n=number: send(n, "progress", (done, total))) if progress else None
        _answer(send, number, host.call(method, args, kwargs, report))
    host.close()


def _read(connection: Connection, host: Host, queue: Queue[Any], send: Any) -> None:
    """Calls for later go into the queue; those for now are made here, beside the one that runs."""
    while True:
        try:
            when, *call = connection.recv()
        except (EOFError, OSError):
            queue.put(None)
            return
        if when == "now":
            number, method, args, kwargs, _ = call
            _answer(send, number, host.call(method, args, kwargs))
        else:
            queue.put(None if when == "close" else call)


def _answer(send: Any, number: int, found: Answer) -> None:
    try:
        send(number, "answer", found)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # nobody is there to hear it
    except Exception as error:  # what was returned cannot be sent
        send(number, "answer", Answer(error=f"the result cannot be sent: {type(error).__name__}: {error}"))


def _die_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: it returns when the other end is closed
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
