"""Malicious clients: what an honest client sends, corrupted on its way out.

An attacker is a wrapper around the honest client of whatever method; no strategy knows of it. It trains on its
own data or on what :meth:`Attack.poison` makes of them, and a :class:`MaliciousClient` corrupts each of its
replies. Where attackers see what the honest clients send, an :class:`AttackedGrid` corrupts the replies on their
way to the server. What the client keeps to itself, such as a personal model, and what it measures stay honest.

====================== ===============================================================================
attack                 what is corrupted
====================== ===============================================================================
``label-flip``         all training labels become class 0
``label-flip:TARGET``  all training labels become that class
``label-flip:permute`` the training labels are permuted, no class keeps its own; differs by attacker
``gaussian:SIGMA``     noise from N(0, SIGMA²) on each number of the models sent
``sign-flip``          the update is reversed: received - (trained - received)
``sign-flip:SCALE``    the same, SCALE times: received - SCALE · (trained - received)
``scale:SCALE``        the update is sent SCALE times: model replacement
``alie``, ``alie:Z``   a little is enough: the honest mean less Z standard deviations, number by number
``ipm``                inner product manipulation: the honest mean update turned over, twice as much as there are
                       honest clients per attacker
``ipm:EPSILON``        the same, EPSILON times
``nan``                all numbers of the models sent are NaN
``payload:KIND``       knowledge that is valid and wrong; KIND is predictions, prototypes or counts
``payload``            all three kinds
``prototype-swap``     each class gets the prototype, or representation, of another
``lma``                loss-maximising: sure of the class that the honest mean finds least likely
``cpa``                class prior: sure of the class least similar to the one that the honest mean finds likeliest
``count:N``            the client claims N samples
``imitate:SHARE``      one honest client's model or soft predictions, with SHARE of poison
====================== ===============================================================================

Sources: label flipping, with all of a client's labels turned into the target, and Gaussian noise on the model's
parameters are the attacks of FedHyb's section 4, which names Alharbi et al., ECAI 2023, and Tolpegin et al.,
"Data Poisoning Attacks Against Federated Learning Systems", ESORICS 2020, for them. ``scale``, ``alie``, ``ipm``,
``lma`` and ``cpa`` name their papers. The others are this library's own. An attack on models changes nothing in a
method that sends none, one on knowledge nothing in a method that sends no such field.

Examples
--------
>>> import numpy as np
>>> attack = parse_attack("sign-flip:2")
>>> sent, received = [np.float32([3.0])], [np.float32([1.0])]
>>> attack.models(sent, received, ("weight",), np.random.default_rng(0))
[array([-3.], dtype=float32)]
"""

from __future__ import annotations

from flwr_kd.experiments.attacks.attack import Attack, Crowd
from flwr_kd.experiments.attacks.attacked_grid import AttackedGrid
from flwr_kd.experiments.attacks.imitation import Imitation
from flwr_kd.experiments.attacks.knowledge import (
    PAYLOAD_FIELDS,
    ClaimedCount,
    ClassPrior,
    LossMaximizing,
    SwappedPrototypes,
    WrongKnowledge,
)
from flwr_kd.experiments.attacks.labels import LabelFlip
from flwr_kd.experiments.attacks.malicious_client import MaliciousClient
from flwr_kd.experiments.attacks.models import (
    ALittleIsEnough,
    Gaussian,
    InnerProduct,
    ModelReplacement,
    NotANumber,
    SignFlip,
)
from flwr_kd.experiments.attacks.texts import ATTACKS, draw_attackers, parse_attack

__all__ = [
    "ATTACKS",
    "PAYLOAD_FIELDS",
    "ALittleIsEnough",
    "Attack",
    "AttackedGrid",
    "ClaimedCount",
    "ClassPrior",
    "Crowd",
    "Gaussian",
    "Imitation",
    "InnerProduct",
    "LabelFlip",
    "LossMaximizing",
    "MaliciousClient",
    "ModelReplacement",
    "NotANumber",
    "SignFlip",
    "SwappedPrototypes",
    "WrongKnowledge",
    "draw_attackers",
    "parse_attack",
]
