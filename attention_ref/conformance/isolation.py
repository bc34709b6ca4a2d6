"""Somebody's code in a process of its own: a hang or a crash costs one call, not the command.

A `Worker` has an object made in a child process and calls its methods there. The child is a new Python (spawn, no
fork: torch and jax have threads), kept as long as it answers; one that hangs is killed, one that ended is replaced at
the next call. Questions and answers are pickled through a pipe, so answers are plain values and arrays: `plain`.
"""
import faulthandler
import os
import re
import signal
import sys
from contextlib import suppress
from multiprocessing import get_context, parent_process
from tempfile import NamedTemporaryFile
from textwrap import indent
from threading import Thread

import numpy as np

TIMEOUT = 60.0                                           # seconds for one call of a function, one run of a program
LOADING = 600.0                                          # seconds for the import of the module
PATIENCE = 3                                             # calls in a row without an answer, then nothing is asked
STDERR = 2000                                            # characters of what it said that are shown
FRAME = r'  File ".*[/\\]'                               # in a traceback of faulthandler
OURS = re.compile(rf"{FRAME}(attention_ref[/\\]conformance|multiprocessing)[/\\].*\n|"
                  r'  File "<string>", line 1 in <module>\n|\n*Extension modules: .*')


class NoAnswer(Exception):
    """A call that hung, or in which the process ended; the text says which, with the end of its stderr."""


class NotAsked(Exception):
    """A call that was not made, for too many before it had no answer."""


class Worker:
    """The object that make(*arguments) gives, in a child process; make and the arguments are pickled.

    timeout: seconds for one call. A context manager, at whose end the child is gone. ValueError if the object cannot
    be made: what make says itself, or how the process ended.
    """

    def __init__(self, make, *arguments, timeout=TIMEOUT):
        self.recipe, self.timeout, self.unanswered = (make, arguments), positive(timeout), 0
        self.said, self.process = NamedTemporaryFile("rb"), None        # what the child writes, stdout and stderr
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def ask(self, method, *arguments):
        """What a method of the object returns; what it raises is raised here, under its name and with its text.

        NoAnswer if it hangs or the process ends; NotAsked after PATIENCE of these in a row.
        """
        if self.unanswered >= PATIENCE:
            raise NotAsked(f"{PATIENCE} calls in a row had no answer")
        if not self.process:
            self._start()
        raised, answer = self._exchange((method, arguments), self.timeout)
        self.unanswered = 0
        if raised:
            raise rebuilt(raised, answer)
        return answer

    def close(self):
        """End the child and whatever it started."""
        self._kill()
        self.said.close()

    def _start(self):
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.said.name))
        self.process.start()
        theirs.close()
        try:
            raised, answer = self._exchange(self.recipe, LOADING)
        except NoAnswer as error:
            raise ValueError(f"impl: cannot be loaded: {error}") from None
        if raised:
            self._kill()
            name, text = answer
            raise ValueError(text if raised is ValueError else f"impl: cannot be loaded: {name}: {text}")

    def _exchange(self, question, timeout):
        """The `outcome` of a question; NoAnswer if there is none."""
        try:
            self.connection.send(question)
            answer = self.connection.recv() if self.connection.poll(timeout) else None
        except (EOFError, OSError):                      # its end of the pipe is closed
            self.process.join(1)
            self._fail(f"the process {ended(self.process.exitcode)}")
        except KeyboardInterrupt:                        # nobody will read this answer
            self._kill()
            raise
        if not answer:
            self._fail(f"no answer after {timeout:g} s")
        passed_on(self._new())
        return answer

    def _fail(self, how):
        self._kill()
        self.unanswered += 1
        raise NoAnswer(with_stderr(how, OURS.sub("", self._new())))

    def _new(self):
        """What the child said since it was last asked for."""
        return self.said.read().decode(errors="replace")

    def _kill(self):
        if self.process:
            self.process.kill()
            kill_group(self.process.pid)
            self.process.join()
            self.process.close()
            self.connection.close()
        self.process = None


def positive(timeout):
    """A timeout, eleven days at most; ValueError if it is no number of seconds above 0."""
    if not timeout > 0:
        raise ValueError(f"timeout: expected a number of seconds > 0, got {timeout:g}")
    return min(timeout, 1e6)


def kill_group(pid):
    """End what is left of a process that led a session of its own."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def ended(code):
    """How a process ended, in words."""
    if code is None or code >= 0:
        return f"left with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by signal {-code} ({signal.strsignal(-code)}, {names.get(-code, 'no name')})"


def with_stderr(how, text):
    """How a call failed, and the end of what it wrote to stderr."""
    return f"{how}; stderr: {indent(text[-STDERR:].strip(), '    ').strip() or 'nothing'}"


def passed_on(text):
    """Write what the child said to stderr, on a terminal in place of the line of progress."""
    if text:
        print("\r\x1b[K" * sys.stderr.isatty() + text, end="", file=sys.stderr, flush=True)


def rebuilt(kind, name_and_text):
    """An exception of the child as one of this process: its kind, its name and its text."""
    name, text = name_and_text
    return type(name, (kind,), {})(text)


def plain(y):
    """An array as it is; one of Python objects as its shape, for what they are may not be pickled."""
    return np.full(y.shape, None) if y.dtype.kind == "O" else y


# In the child

def serve(connection, path):
    """Make an object and answer calls of its methods, until nobody asks."""
    if hasattr(os, "setsid"):
        os.setsid()                                      # Ctrl-C is for the parent; what this one starts ends with it
    said = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable(all_threads=False)
    Thread(target=end_with_parent, daemon=True).start()
    make, arguments = connection.recv()
    raised, made = outcome(make, *arguments)
    connection.send((raised, made if raised else None))
    while not raised:
        method, arguments = connection.recv()
        answer = outcome(getattr(made, method), *arguments)
        sys.stdout.flush()
        connection.send(answer)


def outcome(function, *arguments):
    """(None, what it returns), or the kind, and the name and text, of what it raises."""
    try:
        return None, function(*arguments)
    except BaseException as error:                       # an exit and an interrupt, too, are the function's own
        kind = next(k for k in (NotImplementedError, ValueError, BaseException) if isinstance(error, k))
        return Exception if kind is BaseException else kind, (type(error).__name__, str(error))


def end_with_parent():
    """Leave when the parent does, even from within a call, with all that was started."""
    parent_process().join()
    kill_group(os.getpid())
    os._exit(1)
