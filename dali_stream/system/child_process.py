"""A process of this package: a Python interpreter that is connected by a socket, and ends with the process that started it.

It does not import the program of the user, so it can be started from a notebook, from a script without a main guard, and under
any launcher. Messages are pickled. Both ends belong to this package, so they trust each other.
"""

from __future__ import annotations

import array
import contextlib
import errno
import importlib
import logging
import multiprocessing.spawn
import os
import pickle
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dali_stream.errors import DaliStreamError, prefixed
from dali_stream.observe import waiting
from dali_stream.system.torchcodec_import import compile_nothing

_HEAD = struct.Struct("<QI")  # number of bytes and of file descriptors of a message
_MOST_DESCRIPTORS = 253  # of a message, a limit of the kernel
_INT = 4  # bytes of a file descriptor in a message
_MOST_RECORDS = 10_000  # log records that wait for the parent, above which others are dropped
_LOOK_S = 1.0  # interval at which each process looks whether the other one still exists, in seconds
_END_S = 5.0  # time in which a process should end by itself, in seconds. It takes milliseconds unless memory or CPU is short
# Launchers and schedulers send these to all processes of a job. The process that trains decides what they mean.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_log = logging.getLogger("dali_stream")


class CannotStart(Exception):
    """No process can be started, or the process cannot do its work. The message says why."""


class ChildEnded(Exception):
    """The process has ended without being told to. The message says how, such as "was killed by SIGKILL"."""


class ChildTraceback(Exception):
    """Cause of an error that was raised in another process. The message is its traceback in that process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Hello(NamedTuple):
    """First message of the process: the version and the path of the package that it has imported."""

    version: str
    path: str


class _Levels(NamedTuple):
    """Levels of the loggers by name. The process sets them when it receives this."""

    levels: dict[str, int]


class _Logged(NamedTuple):
    record: logging.LogRecord


class _Failed(NamedTuple):
    error: BaseException
    text: str  # its traceback


class Connection:
    """End of the socket between two processes. `send` is thread-safe. Only one thread at a time may call `receive`.

    Args:
        end: Socket.
        other_exists: Function that returns whether the other process exists. An open socket does not show this, since a
            descendant of the other process may hold its end.
        what: What this process waits for, for the log of a long wait. Default: nothing is logged.

    Attributes:
        has_work: Whether more than the levels of loggers was sent.
    """

    has_work = False

    def __init__(self, end: socket.socket, other_exists: Callable[[], bool], what: str = "") -> None:
        self._socket, self._other_exists, self._what = end, other_exists, what
        self._sending = threading.Lock()
        self._is_within = False  # whether only a part of a message was received, since Ctrl-C has interrupted `receive`

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with copies of file descriptors. Raises EOFError if the other process has ended."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        data = _HEAD.pack(len(data), len(descriptors)) + data
        try:
            with self._sending:
                # Without MSG_NOSIGNAL, the end of the other process would end a program that has reset SIGPIPE to its default.
                sent = 0
                if descriptors:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                    sent = self._socket.sendmsg([data], [rights], socket.MSG_NOSIGNAL)
                self._socket.sendall(memoryview(data)[sent:], socket.MSG_NOSIGNAL)
        except OSError:
            raise EOFError from None

    def receive(self, until: float | None = None) -> tuple[Any, list[int]]:
        """Return the next message, and its file descriptors, which the caller must close.

        Args:
            until: Time of `time.monotonic` at which to give up. Default: never.

        Raises:
            EOFError: If the other process has ended, or has closed its end of the socket, or `until` has passed.
            OSError: If this process has too many open files to get the file descriptors.
        """
        if self._is_within:
            raise EOFError
        try:
            self._wait(until)
            self._is_within = True
            # `socket.recv_fds` ignores its flags, at least up to Python 3.11.
            room = socket.CMSG_LEN(_MOST_DESCRIPTORS * _INT)
            head, rights, _, _ = self._socket.recvmsg(_HEAD.size, room, socket.MSG_CMSG_CLOEXEC)
            descriptors = [number for _, _, numbers in rights for number in memoryview(numbers).cast("i")]
            size, count = _HEAD.unpack(head + self._read(_HEAD.size - len(head)))
            data = self._read(size)
        except (OSError, ValueError):  # of a socket that another thread has closed, or whose other end was reset
            raise EOFError from None
        self._is_within = False
        if len(descriptors) < count:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        message = pickle.loads(data)
        if not isinstance(message, _Levels):
            return message, descriptors
        for name, level in message.levels.items():
            logging.getLogger(name).setLevel(level)
        return self.receive(until)

    def _wait(self, until: float | None) -> None:
        """Wait for a message or the end of the other process."""
        began, told = time.monotonic(), not self._what
        readable = select.poll()  # one for each call, since a signal handler that interrupts this one may call `close`
        readable.register(self._socket, select.POLLIN)
        while not readable.poll(_LOOK_S * 1000):
            if (not self._other_exists() and not readable.poll(0)) or (until is not None and time.monotonic() > until):
                raise EOFError
            if not told and time.monotonic() - began > 2 * waiting.LONG_WAIT_S:  # the other process logs what it waits for
                told = True
                _log.warning("waited for %s for %.0f s, and continue to wait", self._what, time.monotonic() - began)

    def wait_for_end(self) -> None:
        """Wait until the other process has ended, or sends nothing more."""
        ended = select.poll()
        ended.register(self._socket, select.POLLRDHUP)
        while not ended.poll(_LOOK_S * 1000) and self._other_exists():
            pass

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            count = self._socket.recv_into(rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return data

    def end(self) -> None:
        """Send nothing more. The other process gets EOFError. Its messages can still be received."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket, but not its copies in forked processes."""
        self._socket.close()


class Child:
    """Process that runs a function of this package. It ends when this process ends, however that is.

    The process inherits the environment, the CPU affinity, the priority, and the options of the interpreter. It has the module
    search path of this process, logs through the loggers of this process, and ignores the signals that end jobs.

    Args:
        main: Function to run, "module:function". It gets a `Connection`, and the process ends when it returns.
        what: Name of the process for messages, such as "the process of the Loader".

    Raises:
        CannotStart: If no interpreter can be started.
    """

    def __init__(self, main: str, what: str) -> None:
        if reason := _obstacle():
            raise CannotStart(reason)
        self._what, self._greeted = what, False
        self._receiving = threading.RLock()  # a signal handler that interrupts `receive` may call `close`
        own, other = socket.socketpair()
        with other:
            try:
                with _blocked_signals():  # the process inherits the blocked signals, until it ignores them
                    self._process = subprocess.Popen(
                        _command(other.fileno(), main), stdin=subprocess.DEVNULL, pass_fds=[other.fileno()]
                    )
            except (OSError, ValueError) as error:
                own.close()
                raise CannotStart(f"{sys.executable} cannot be started ({error})") from error
        process = self._process
        self._connection = Connection(own, lambda: process.poll() is None, what)
        self._finalizer = weakref.finalize(self, _end, process, self._connection)  # if it is dropped, and at exit
        _children.add(self)
        self.send_log_levels()

    @property
    def number(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process, without waiting for its end."""
        self._process.kill()

    def send_log_levels(self) -> None:
        """Send the levels of all loggers, so that the process makes the records that are logged here."""
        known = list(logging.root.manager.loggerDict.items())
        levels = {name: logger.level for name, logger in known if isinstance(logger, logging.Logger) and logger.level}
        with contextlib.suppress(EOFError):
            self._connection.send(_Levels({"": logging.root.level, **levels}))

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with copies of file descriptors. If the process has ended, do nothing, since `receive` says how."""
        with contextlib.suppress(EOFError):
            self._connection.send(message, descriptors)
            self._connection.has_work = True

    def end(self) -> None:
        """Let the process end, without waiting for it."""
        self._connection.end()

    def receive(self) -> tuple[Any, list[int]]:
        """Return the next message, and its file descriptors, which the caller must close. Log what the process logs.

        Raises:
            ChildEnded: If the process has ended.
            CannotStart: If it has ended before it had imported this package, or has imported another version.
            Exception: Error that ended the function of the process.
        """
        with self._receiving:
            while True:
                try:
                    message, descriptors = self._connection.receive()
                except EOFError:
                    raise self._ended() from None
                if isinstance(message, _Logged):
                    _log_here(message.record)
                elif isinstance(message, _Hello):
                    self._greeted = True
                    if message != (own := _hello()):
                        raise CannotStart(f"{sys.executable} imports dali_stream {message}, and not {own}")
                else:
                    return checked(message), descriptors

    def _ended(self) -> Exception:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it has closed its end, which it does only when it ends
            self._process.kill()
            code = self._process.wait()
        if code < 0:
            return ChildEnded(f"was killed by {_signal_name(-code)}")
        if not self._greeted:
            return CannotStart(f"{sys.executable} has ended with exit code {code} before it had imported dali_stream")
        return ChildEnded(f"has ended with exit code {code}")

    def close(self) -> None:
        """End the process, and wait for it. Its last log records are logged. May be called from any thread, and repeatedly."""
        _let_end(self._process, self._connection)
        until = time.monotonic() + _END_S
        if self._receiving.acquire(timeout=_END_S):  # otherwise another thread logs them
            try:
                with contextlib.suppress(EOFError, OSError):
                    while True:
                        message, descriptors = self._connection.receive(until)
                        for descriptor in descriptors:
                            os.close(descriptor)
                        if isinstance(message, _Logged):
                            _log_here(message.record)
            finally:
                self._receiving.release()
        if time.monotonic() >= until:  # it was stopped, for example
            self._process.kill()
        self._finalizer()

    def abandon(self) -> None:
        """Leave the process to the parent of a forked process: close only the copy of the socket."""
        self._finalizer.detach()
        self._connection.close()
        self._process.returncode = 0  # it cannot be waited for here


_children: weakref.WeakSet[Child] = weakref.WeakSet()


def _let_end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Let a process end. If it has got no work yet, kill it, since it may import modules for seconds before it notices."""
    connection.end()
    if not connection.has_work:
        process.kill()


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Let a process end, and wait for it. If this takes too long, kill it."""
    _let_end(process, connection)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    connection.close()


def _leave_to_the_parent() -> None:
    for child in list(_children):
        child.abandon()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _obstacle() -> str:
    """Return why no interpreter can be started, or an empty string."""
    if getattr(sys, "frozen", False):
        return f"{sys.executable} is a frozen program, and not a Python interpreter"
    if not multiprocessing.spawn.get_executable():
        return "sys.executable is empty, as in an embedded interpreter"
    return "" if hasattr(os, "memfd_create") else "this system has no memfd_create"


def _command(descriptor: int, main: str) -> list[str]:
    """Return the command that runs `main` in another interpreter. `python -m` would also search the current folder."""
    path = [folder or os.getcwd() for folder in sys.path if isinstance(folder, str)]  # imports ignore other entries
    code = f"import sys; sys.path[:] = {path!r}; import {__name__} as child; child.serve({descriptor}, {main!r}, {os.getpid()})"
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [os.fsdecode(multiprocessing.spawn.get_executable()), *flags, "-c", code]


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block the signals that a child process ignores, in this thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hello() -> _Hello:
    package = sys.modules[__name__.partition(".")[0]]
    return _Hello(package.__version__, os.path.dirname(os.path.abspath(str(package.__file__))))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time signals have no name
        return f"signal {number}"


def _log_here(record: logging.LogRecord) -> None:
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


class _ToParent(logging.Handler):
    """Handler that sends records to the parent, whose loggers handle them."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._records: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="dali_stream log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        if self._records.qsize() < _MOST_RECORDS:
            self._records.put(record)

    def _send(self) -> None:
        """Send the records. No other thread does this, since the socket is full while the parent does not receive."""
        with contextlib.suppress(EOFError):  # the parent has ended
            while (record := self._records.get()) is not None:
                self._connection.send(_Logged(record))

    def finish(self) -> None:
        """Send what is left, if this takes no longer than `_LOOK_S`."""
        self._records.put(None)
        self._thread.join(_LOOK_S)


def serve(descriptor: int, main: str, parent: int) -> None:
    """Run `main` in a new process. Its end is the end of the process, without waiting for any thread.

    Args:
        descriptor: Socket to the parent.
        main: See `Child`.
        parent: Number of the parent.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    os.set_inheritable(descriptor, False)
    # The parent is compared, since a thread of it that ends is no reason to end, as with PR_SET_PDEATHSIG.
    connection = Connection(socket.socket(fileno=descriptor), lambda: os.getppid() == parent)
    code, log = 0, _ToParent(connection)
    try:
        connection.send(_hello())
        logging.root.addHandler(log)
        module, _, function = main.partition(":")
        compile_nothing()
        try:
            run = getattr(importlib.import_module(module), function)
        except DaliStreamError:  # such as a torchcodec that cannot be loaded, here or there
            raise
        except Exception as error:
            raise CannotStart(f"{module} cannot be imported there ({type(error).__name__}: {error})") from error
        run(connection)
    except EOFError:  # the parent has ended, or needs this process no more
        pass
    except BaseException as error:
        code = 1
        send_error(connection, error)
    log.finish()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def checked(message: Any) -> Any:
    """Return a message. If it is an error that `send_error` sent, raise the error."""
    if isinstance(message, _Failed):
        raise message.error from ChildTraceback(message.text)
    return message


def send_error(connection: Connection, error: BaseException) -> None:
    """Send an error, which `Child.receive` and `checked` raise. If the parent has ended, do nothing."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = prefixed(type(error).__name__, error) if isinstance(error, Exception) else RuntimeError(repr(error))
    with contextlib.suppress(EOFError):
        connection.send(_Failed(error, text))
