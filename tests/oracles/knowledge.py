"""The maths of FedHKD, FedProto and FedProx a second time: plain Python floats and loops, no tensors.

Written from the papers' equations (numbers in brackets are FedHKD's) and never from the code under test.
Knowledge is a mapping from class to what is known of it, so that a class that nobody shares is *missing*, as
the paper's empty set is, and cannot be mixed up with a row of zeros. Every function carries a case worked by
hand; the cases run as doctests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Vector = Sequence[float]
Matrix = Sequence[Vector]


class ClassKnowledge(NamedTuple):
    """Knowledge of one class, of a client or of the server."""

    representation: list[float]
    prediction: list[float]
    samples: int


class ClassMean(NamedTuple):
    """A prototype and how many samples are behind it."""

    mean: list[float]
    samples: int


def softmax(logits: Vector, temperature: float) -> list[float]:
    """Q(z, T), equation (2).

    With z = (ln 2, 0) and T = 1/2 the exponentials are 4 and 1:

    >>> [round(p, 12) for p in softmax([math.log(2), 0.0], 0.5)]
    [0.8, 0.2]
    """
    top = max(logits)
    exponentials = [math.exp((z - top) / temperature) for z in logits]
    total = math.fsum(exponentials)
    return [e / total for e in exponentials]


def distance(a: Vector, b: Vector) -> float:
    """Euclidean distance.

    >>> distance([4.0, 6.0], [1.0, 2.0])
    5.0
    """
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def mean(rows: Matrix) -> list[float]:
    """Column means of a non-empty list of rows.

    >>> mean([[1.0, 2.0], [3.0, 6.0]])
    [2.0, 4.0]
    """
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def kl_divergence(teacher: Matrix, student_logits: Matrix, temperature: float) -> float:
    """Mean over rows of KL(teacher || softmax(student / T)), with 0 ln 0 = 0.

    softmax(ln 3, 0) = (3/4, 1/4), and KL((1/2, 1/2) || (3/4, 1/4)) = ln(2/3)/2 + ln(2)/2 = ln(4/3)/2:

    >>> math.isclose(kl_divergence([[0.5, 0.5]], [[math.log(3), 0.0]], 1.0), math.log(4 / 3) / 2)
    True
    """
    total = 0.0
    for p, z in zip(teacher, student_logits, strict=True):
        q = softmax(z, temperature)
        total += math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    return total / len(teacher)


# --- FedHKD ---


def local_knowledge(
    features: Matrix,
    logits: Matrix,
    labels: Sequence[int],
    *,
    num_classes: int,
    threshold: float,
    temperature: float,
    clip: float,
) -> dict[int, ClassKnowledge]:
    """Equation (4) over clipped representations; only classes with a fraction of at least ``threshold``.

    Clipping comes before averaging: (5, 1) clipped to 3 is (3, 1), mean 2; the mean 3 clipped would be 3.
    Class 1 has one sample of three, less than 0.4, and is not shared.

    >>> local_knowledge([[5.0], [1.0], [0.0]], [[0.0, 0.0]] * 3, [0, 0, 1],
    ...                 num_classes=2, threshold=0.4, temperature=0.5, clip=3.0)
    {0: ClassKnowledge(representation=[2.0], prediction=[0.5, 0.5], samples=2)}
    """
    known = {}
    for j in range(num_classes):
        mine = [k for k, y in enumerate(labels) if y == j]
        if not mine or len(mine) / len(labels) < threshold:
            continue
        clipped = [[max(-clip, min(clip, value)) for value in features[k]] for k in mine]
        soft = [softmax(logits[k], temperature) for k in mine]
        known[j] = ClassKnowledge(mean(clipped), mean(soft), len(mine))
    return known


def aggregate_knowledge(clients: Sequence[Mapping[int, ClassKnowledge]]) -> dict[int, ClassKnowledge]:
    """Equation (9): weights N_i^j / N^j over the clients that share class j.

    (1 · 1 + 3 · 5) / 4 = 4 and (1 · 0.8 + 3 · 0.4) / 4 = 0.5:

    >>> one = {0: ClassKnowledge([1.0], [0.8, 0.2], 1)}
    >>> three = {0: ClassKnowledge([5.0], [0.4, 0.6], 3)}
    >>> h, q, n = aggregate_knowledge([one, three])[0]
    >>> h, [round(p, 12) for p in q], n
    ([4.0], [0.5, 0.5], 4)
    """
    merged = {}
    for j in sorted({j for client in clients for j in client}):
        sharing = [client[j] for client in clients if j in client]
        total = sum(knowledge.samples for knowledge in sharing)
        weights = [knowledge.samples / total for knowledge in sharing]
        merged[j] = ClassKnowledge(
            _weighted([knowledge.representation for knowledge in sharing], weights),
            _weighted([knowledge.prediction for knowledge in sharing], weights),
            total,
        )
    return merged


def noise_std(count: int, *, sigma: float, clip: float) -> float:
    """Standard deviation per element of the noise in (7): the sensitivity of (8), 2 ζ / N_i^j, times σ.

    >>> noise_std(6, sigma=7.0, clip=3.0)
    7.0
    """
    return 2 * clip / count * sigma


def classifier_loss(
    logits_of_representations: Matrix, knowledge: Mapping[int, Vector], temperature: float
) -> float:
    """Second term of (11) without λ; ``knowledge`` maps a class to its soft prediction.

    (0.8, 0.2) is 0.3 √2 away from (0.5, 0.5); the other class of the two has no knowledge, n stays 2:

    >>> loss = classifier_loss([[math.log(2), 0.0], [9.0, 9.0]], {0: [0.5, 0.5]}, 0.5)
    >>> math.isclose(loss, 0.3 * math.sqrt(2) / 2)
    True
    """
    terms = [distance(softmax(logits_of_representations[j], temperature), q) for j, q in knowledge.items()]
    return math.fsum(terms) / len(logits_of_representations)


def classifier_loss_gradient(
    logits_of_representations: Matrix, knowledge: Mapping[int, Vector], temperature: float
) -> list[list[float]]:
    """Closed form of d :func:`classifier_loss` / d logits; zero for a class at distance zero.

    With p = Q(z, T), d = p - Q and r = ‖d‖: dr/dz_m = p_m (d_m - Σ_l p_l d_l) / (T r).
    For p = (0.8, 0.2), d = (0.3, -0.3): Σ p d = 0.18, so 0.8 · 0.12 / (0.5 · 0.3 √2) and its negative, over
    n = 2:

    >>> gradient = classifier_loss_gradient([[math.log(2), 0.0], [9.0, 9.0]], {0: [0.5, 0.5]}, 0.5)
    >>> math.isclose(gradient[0][0], 0.32 / math.sqrt(2)), math.isclose(gradient[0][1], -0.32 / math.sqrt(2))
    (True, True)
    >>> gradient[1]
    [0.0, 0.0]
    """
    n = len(logits_of_representations)
    gradient = [[0.0] * len(row) for row in logits_of_representations]
    for j, target in knowledge.items():
        p = softmax(logits_of_representations[j], temperature)
        r = distance(p, target)
        if r == 0:
            continue
        d = [a - b for a, b in zip(p, target, strict=True)]
        inner = math.fsum(a * b for a, b in zip(p, d, strict=True))
        gradient[j] = [a * (b - inner) / (temperature * r * n) for a, b in zip(p, d, strict=True)]
    return gradient


def feature_loss(features: Matrix, labels: Sequence[int], knowledge: Mapping[int, Vector]) -> float:
    """Third term of (11) without γ; ``knowledge`` maps a class to its representation.

    Distances 5 and 0, and a sample of an unknown class that adds nothing but counts: 5 / 3.

    >>> 3 * feature_loss([[3.0, 4.0], [1.0, 1.0], [9.0, 9.0]], [0, 1, 2], {0: [0.0, 0.0], 1: [1.0, 1.0]})
    5.0
    """
    terms = [distance(x, knowledge[y]) for x, y in zip(features, labels, strict=True) if y in knowledge]
    return math.fsum(terms) / len(features)


def feature_loss_gradient(
    features: Matrix, labels: Sequence[int], knowledge: Mapping[int, Vector]
) -> list[list[float]]:
    """Closed form of d :func:`feature_loss` / d features: unit vectors over the batch size, or zero.

    >>> feature_loss_gradient([[3.0, 4.0], [1.0, 1.0]], [0, 1], {0: [0.0, 0.0], 1: [1.0, 1.0]})
    [[0.3, 0.4], [0.0, 0.0]]
    """
    gradient = []
    for x, y in zip(features, labels, strict=True):
        target = knowledge.get(y, x)
        r = distance(x, target)
        gradient.append([(a - b) / r / len(features) if r else 0.0 for a, b in zip(x, target, strict=True)])
    return gradient


def cross_entropy(logits: Matrix, labels: Sequence[int]) -> float:
    """First term of (11).

    >>> round(cross_entropy([[math.log(3), 0.0]], [1]), 12) == round(math.log(4), 12)
    True
    """
    return -math.fsum(math.log(softmax(z, 1.0)[y]) for z, y in zip(logits, labels, strict=True)) / len(logits)


# --- FedProto ---


def class_means(values: Matrix, labels: Sequence[int]) -> dict[int, ClassMean]:
    """FedProto's C_i^j: the mean of the representations of class j.

    >>> class_means([[1.0], [3.0], [5.0]], [2, 2, 0])
    {0: ClassMean(mean=[5.0], samples=1), 2: ClassMean(mean=[2.0], samples=2)}
    """
    result = {}
    for j in sorted(set(labels)):
        rows = [value for value, y in zip(values, labels, strict=True) if y == j]
        result[j] = ClassMean(mean(rows), len(rows))
    return result


def aggregate_means(clients: Sequence[Mapping[int, ClassMean]]) -> dict[int, ClassMean]:
    """FedProto's global prototypes: means weighted by the class's count.

    >>> aggregate_means([{0: ClassMean([1.0], 1)}, {0: ClassMean([5.0], 3), 1: ClassMean([7.0], 2)}])
    {0: ClassMean(mean=[4.0], samples=4), 1: ClassMean(mean=[7.0], samples=2)}
    """
    merged = {}
    for j in sorted({j for client in clients for j in client}):
        owners = [client[j] for client in clients if j in client]
        total = sum(owner.samples for owner in owners)
        merged[j] = ClassMean(
            _weighted([owner.mean for owner in owners], [owner.samples / total for owner in owners]), total
        )
    return merged


def prototype_loss(features: Matrix, labels: Sequence[int], prototypes: Mapping[int, Vector]) -> float:
    """FedProto's L_R over one batch: summed over classes, the distance of the *batch mean* to the prototype.

    The mean of (3, 4) and (-3, 4) is (0, 4), three away from (0, 1); single samples would be 3 √2 away.

    >>> prototype_loss([[3.0, 4.0], [-3.0, 4.0], [8.0, 8.0]], [0, 0, 2], {0: [0.0, 1.0], 1: [5.0, 5.0]})
    3.0
    """
    means = class_means(features, labels)
    return math.fsum(distance(m.mean, prototypes[j]) for j, m in means.items() if j in prototypes)


def prototype_loss_gradient(
    features: Matrix, labels: Sequence[int], prototypes: Mapping[int, Vector]
) -> list[list[float]]:
    """Closed form of d :func:`prototype_loss` / d features: each class's unit vector, shared out to samples.

    >>> prototype_loss_gradient([[3.0, 4.0], [-3.0, 4.0], [8.0, 8.0]], [0, 0, 2], {0: [0.0, 1.0]})
    [[0.0, 0.5], [0.0, 0.5], [0.0, 0.0]]
    """
    means = class_means(features, labels)
    gradient = []
    for x, y in zip(features, labels, strict=True):
        row = [0.0] * len(x)
        if y in prototypes:
            r = distance(means[y].mean, prototypes[y])
            if r:
                row = [
                    (a - b) / r / means[y].samples for a, b in zip(means[y].mean, prototypes[y], strict=True)
                ]
        gradient.append(row)
    return gradient


# --- FedProx ---


def proximal_term(parameters: Sequence[Vector], reference: Sequence[Vector], mu: float) -> float:
    """μ/2 ‖w - w_t‖² over all parameters, each given flat.

    >>> proximal_term([[1.0, 2.0], [3.0]], [[0.0, 0.0], [1.0]], 0.5)
    2.25
    """
    squares = (
        (a - b) ** 2
        for w, w_t in zip(parameters, reference, strict=True)
        for a, b in zip(w, w_t, strict=True)
    )
    return mu / 2 * math.fsum(squares)


def proximal_sgd(
    start: Vector, batches: Sequence[tuple[Matrix, Vector]], *, mu: float, learning_rate: float
) -> list[list[float]]:
    """Weights after each SGD step of FedProx on ½ mean (w·x - y)², from and around ``start``.

    w_0 = 1; batch (x, y) = (1, 3): gradient -2, proximal gradient 0, so w_1 = 1 + 0.5 · 2 = 2. Batch (1, 4):
    gradient -2, proximal gradient μ (2 - 1) = 1, so w_2 = 2 + 0.5 · 1 = 2.5. Without the proximal part w_2
    would be 3.

    >>> proximal_sgd([1.0], [([[1.0]], [3.0]), ([[1.0]], [4.0])], mu=1.0, learning_rate=0.5)
    [[2.0], [2.5]]
    """
    w = list(start)
    path = []
    for xs, ys in batches:
        errors = [
            math.fsum(a * b for a, b in zip(w, x, strict=True)) - y for x, y in zip(xs, ys, strict=True)
        ]
        gradient = mean([[e * a for a in x] for e, x in zip(errors, xs, strict=True)])
        pull = [mu * (a - b) for a, b in zip(w, start, strict=True)]
        w = [a - learning_rate * (g + p) for a, g, p in zip(w, gradient, pull, strict=True)]
        path.append(w)
    return path


# --- shared ---


def numerical_gradient(
    function: Callable[[Matrix], float], at: Matrix, step: float = 1e-6
) -> list[list[float]]:
    """Central differences of a scalar function of a matrix.

    >>> gradient = numerical_gradient(lambda m: m[0][0] * m[0][1] ** 2, [[2.0, 3.0]])
    >>> [round(g, 6) for g in gradient[0]]
    [9.0, 12.0]
    """
    gradient = []
    for i, row in enumerate(at):
        line = []
        for k in range(len(row)):
            shifted = []
            for sign in (1.0, -1.0):
                copy = [list(each) for each in at]
                copy[i][k] += sign * step
                shifted.append(function(copy))
            line.append((shifted[0] - shifted[1]) / (2 * step))
        gradient.append(line)
    return gradient


def _weighted(rows: Matrix, weights: Vector) -> list[float]:
    return [
        math.fsum(w * v for w, v in zip(weights, column, strict=True)) for column in zip(*rows, strict=True)
    ]
