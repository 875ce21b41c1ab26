"""What an error reply says, in one line."""

from __future__ import annotations

import pytest
from flwr.app import Error

from flwr_kd.transport.delivery import reason_of

RAY = """ray::ClientAppActor.run() (pid=71, ip=127.0.0.1, actor_id=9f)
  File "client_app.py", line 163, in run
    raise ClientAppException(str(ex)) from ex
flwr.clientapp.client_app.ClientAppException:
Exception ClientAppException occurred. Message: no room"""


RAY_SAYS = "Exception ClientAppException occurred. Message: no room"


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (2, "<class 'ValueError'>:<'no room\nfor it'>", "ValueError: no room"),
        (
            2,
            "<class 'flwr_kd.checks.ConfigError'>:<'model must be there'>",
            "flwr_kd.checks.ConfigError: model must be there",
        ),
        (2, "<class 'KeyError'>:<''a''>", "KeyError: 'a'"),
        (2, "<class 'RuntimeError'>:<''>", "RuntimeError"),
        (2, f"<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'{RAY}'>", RAY_SAYS),
        (2, f"<class 'x.RayTaskError'>:<'{RAY}'>", RAY_SAYS),
        (
            0,
            "<class 'ray.exceptions.ActorUnavailableError'>:<'The actor 9f is unavailable: x'>",
            "its process died",
        ),
        (0, "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly'>", "its process died"),
        (0, "<class 'ray.exceptions.OutOfMemoryError'>:<'Task was killed'>", "its process died"),
        (8, "ClientApp stopped responding.", "its process died"),
        (5, "Error: Node Unavailable", "its SuperNode is gone (Error: Node Unavailable)"),
        (3, "Error: Message Unavailable", "it did not reply in time, or its reply was lost"),
        (2, "", "no reason given"),
        (2, "\n \n", "no reason given"),
        (2, "a\n\x1b[31mWARNING: forged\x00", "?[31mWARNING: forged?"),
        (2, "x" * 5000, "x" * 300 + "..."),
    ],
)
def test_an_error_reply_is_one_line(code: int, reason: str, expected: str) -> None:
    assert reason_of(Error(code, reason)) == expected
