"""One process of a test run that imports what traces need, and forks every tracing process.

The imports take a process 7 CPU seconds, most traces half of one. This file is the command of a
tracing process, too: it asks the server for one, starts the server where none runs, and ends with
what it asked for.
"""

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

STEPPER = "trials.training.optimizers.deepspeed_stepper"
SERVER = ("-m", "trials.child_process.bootstrap", "fakes.tracing_server")


def shared_command(folder: Path, owner: int) -> tuple[str, ...]:
    """Command of a tracing process that the server in this folder forks.

    Args:
        folder: folder of the server's socket.
        owner: process with which the server ends.
    """
    from trials.child_process.environment import child_environment  # noqa: PLC0415 - not to ask

    environment = child_environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parents[1]}"
    file = folder / f"tracing-{os.getpid()}.json"
    file.write_text(json.dumps(environment), encoding="utf-8")
    # -S: it needs no package.
    return (sys.executable, "-S", __file__, str(folder / "tracing"), str(file), str(owner))


def ask(address: str, environment_file: str, owner: str, descriptor: str) -> None:
    """Have a tracing process forked that answers at a socket, and wait for its end."""
    with socket.socket(socket.AF_UNIX) as server:
        with Path(f"{address}.lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                server.connect(address)
            except (FileNotFoundError, ConnectionRefusedError):
                _start_server(address, json.loads(Path(environment_file).read_bytes()), owner)
                server.connect(address)
        environment = os.memfd_create("environment")
        os.write(environment, json.dumps([dict(os.environ), str(Path.cwd())]).encode())
        socket.send_fds(server, [b"?"], [int(descriptor), 1, environment])
        os.close(int(descriptor))
        server.recv(1)


def _start_server(address: str, environment: dict[str, str], owner: str) -> None:
    """Start a server that listens from now on, and accepts once it has imported all."""
    Path(address).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(100)
        subprocess.Popen(
            [sys.executable, *SERVER, str(listener.fileno()), owner],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
        )


def serve(descriptor: int, owner: int) -> None:
    """Fork a tracing process for every connection, until the owner ends."""
    from trials.simulation.tracing.bootstrap import import_libraries  # noqa: PLC0415 - seconds

    import_libraries()
    importlib.import_module("peft")  # seconds that one trace in a few would take again
    with contextlib.suppress(ImportError):
        importlib.import_module(STEPPER).deepspeed_library("cpu")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes
    server = os.getpid()
    ended = os.pidfd_open(owner)
    with socket.socket(fileno=descriptor) as listener:
        while ended not in select.select([listener, ended], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                files = socket.recv_fds(connection, 1, 3)[1]
                if os.fork() == 0:
                    listener.close()
                    _trace(files, server)
            for file in files:
                os.close(file)
    os._exit(0)


def _trace(files: list[int], server: int) -> NoReturn:
    """Be the tracing process: its socket, its output and its environment are in the files."""
    from trials.child_process.parent_death import die_with_parent  # noqa: PLC0415 - not to ask
    from trials.simulation.tracing.tracing_worker import main  # noqa: PLC0415 - seconds

    try:
        die_with_parent(server)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asked, printed, environment = files
        for output in (1, 2):
            os.dup2(printed, output)
        variables, folder = json.loads(os.pread(environment, os.fstat(environment).st_size, 0))
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        sys.argv[1:] = [str(asked)]
        main()
    finally:
        os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        ask(*sys.argv[1:])
    else:
        serve(*map(int, sys.argv[1:]))
