"""Results to report."""

from __future__ import annotations

from flwr_kd.results.schema import Comparison, RoundResult, RunResult

HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>\u202e"


def a_run(method: str, seed: int, last: float, *, rounds: int = 3, label: str = "") -> RunResult:
    """Return a run whose local accuracy ends at ``last``, and in which the second client is 0.1 better."""

    def stats(number: int) -> RoundResult:
        local = last - 0.1 * (rounds - number)
        clients = {str(client): {"local_accuracy": local + 0.1 * client - 0.05} for client in range(2)}
        return RoundResult(
            number,
            local,
            local / 2,
            1.0 / number,
            1_000_000,
            3_000_000,
            0.5,
            2,
            0,
            clients=clients,
            available=2,
        )

    return RunResult(
        method,
        seed,
        tuple(stats(number) for number in range(1, rounds + 1)),
        {"lr": 0.05},
        [[5, 0, 7], [0, 9, 1]],
        label,
    )


def a_result(partition: str = "iid", gain: float = 0.1, **config: object) -> Comparison:
    """Return FedAvg and FedProto on two seeds; FedProto is better by ``gain``, and by 0.02 more on the second."""
    runs = [
        a_run(method, seed, 0.6 + better * (gain + 0.02 * seed))
        for method, better in (("fedavg", 0), ("fedproto", 1))
        for seed in (0, 1)
    ]
    settings = {
        "dataset": "digits",
        "partition": partition,
        "clients": 2,
        "rounds": 3,
        "model": "mlp",
        **config,
    }
    return Comparison(settings, {"torch": "2.4"}, "flwr-kd compare fedavg fedproto", tuple(runs))


def a_hostile_result() -> Comparison:
    """Return a result whose every free text is markup."""
    run = a_run(HOSTILE, 0, 0.5)
    changed = RunResult(
        HOSTILE,
        0,
        tuple(
            RoundResult(
                **{
                    **{name: getattr(stats, name) for name in ("round", "local_accuracy", "global_accuracy")},
                    **{name: getattr(stats, name) for name in ("train_loss", "bytes_up", "bytes_down")},
                    **{name: getattr(stats, name) for name in ("seconds", "participants", "failures")},
                    "clients": {HOSTILE: {"local_accuracy": 0.5}},
                }
            )
            for stats in run.rounds
        ),
        {HOSTILE: HOSTILE},
        run.histogram,
    )
    config = {
        "dataset": HOSTILE,
        "partition": [HOSTILE],
        "model": {HOSTILE: HOSTILE},
        HOSTILE: {HOSTILE: HOSTILE},
    }
    return Comparison(config, {HOSTILE: HOSTILE}, HOSTILE, (changed,))
