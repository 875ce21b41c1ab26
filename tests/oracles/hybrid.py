"""FedHyb a second time, in float64: equations 3 to 8, and rounds of nets with one hidden layer.

Written from the paper's sections 3.1 and 3.2 (its equations in brackets) and the issue's text, never from the code
under test. What is held constant in a gradient is an argument of its own here (`teachers`, `of_beta`), so that no
function knows of detaching. :func:`gradient` differentiates by a complex step, which loses no digits: every
function is analytic where it says so, takes complex numbers, and compares by their real parts.
Every function carries a case worked by hand; the cases run as doctests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


def numbers(values: ArrayLike) -> Array:
    actual = np.asarray(values)
    return actual if np.iscomplexobj(actual) else actual.astype(np.float64)


def gradient(f: Callable[[Array], Any], at: ArrayLike, step: float = 1e-30) -> Array:
    """∂f/∂x for a real f that takes complex numbers: Im f(x + ih)/h.

    >>> gradient(lambda x: (x**3).sum(), [1.0, 2.0]).tolist()
    [3.0, 12.0]
    """
    x = np.asarray(at, dtype=np.complex128)
    actual = np.zeros(x.shape)
    for position in np.ndindex(x.shape):
        moved = x.copy()
        moved[position] += 1j * step
        actual[position] = np.imag(f(moved)) / step
    return actual


# --- equations 3 to 5 ---


def log_softmax(logits: ArrayLike) -> Array:
    """Row by row.

    >>> log_softmax([[1000.0, 0.0], [0.0, 0.0]]).round(12).tolist()
    [[0.0, -1000.0], [-0.69314718056, -0.69314718056]]
    """
    u = numbers(logits)
    u = u - u.real.max(axis=-1, keepdims=True)
    return np.asarray(u - np.log(np.exp(u).sum(axis=-1, keepdims=True)))


def softmax(logits: ArrayLike) -> Array:
    """Q, row by row.

    >>> softmax([[np.log(3), 0.0]]).round(12).tolist()
    [[0.75, 0.25]]
    """
    return np.asarray(np.exp(log_softmax(logits)))


def cross_entropy(logits: ArrayLike, y: ArrayLike) -> Any:
    """Mean over the rows of -log Q_y.

    >>> float(cross_entropy([[np.log(3), 0.0], [np.log(3), 0.0]], [0, 1]).round(12))
    0.836988216786

    which is (log 4/3 + log 4)/2.
    """
    rows = log_softmax(logits)
    return -rows[np.arange(len(rows)), np.asarray(y)].mean()


def kl_of(p: ArrayLike, log_q: ArrayLike) -> Any:
    """Mean over the rows of Σ_c p log(p/q), where 0 log 0 = 0.

    >>> float(kl_of([[0.5, 0.5]], np.log([[0.75, 0.25]])).round(12))
    0.143841036226
    >>> float(kl_of([[1.0, 0.0]], np.log([[0.5, 0.5]])).round(12))
    0.69314718056
    """
    p = numbers(p)
    own = np.where(p.real > 0, p * np.log(np.where(p.real > 0, p, 1.0)), 0.0)
    return (own - p * numbers(log_q)).sum(axis=-1).mean()


def kl(first: ArrayLike, second: ArrayLike) -> Any:
    """KL(Q(first) ‖ Q(second)) of logits, each term of [3].

    >>> float(kl([[0.0, 0.0]], [[np.log(3), 0.0]]).round(12))
    0.143841036226
    >>> float(kl([[1000.0, 0.0]], [[0.0, 0.0]]).round(12))
    0.69314718056
    """
    a, b = log_softmax(first), log_softmax(second)
    return (np.exp(a) * (a - b)).sum(axis=-1).mean()


def beta(loss: Any) -> Any:
    """[4], which is a sigmoid: e^-l/(1 + e^-l).

    >>> float(beta(np.log(3))), float(beta(0.0)), float(beta(1000.0))
    (0.25, 0.5, 0.0)
    """
    return np.exp(-loss) / (1 + np.exp(-loss))


def distillation(
    logits: ArrayLike,
    subs: Sequence[ArrayLike],
    y: ArrayLike,
    a: float,
    *,
    dynamic: bool = True,
    teachers: ArrayLike | None = None,
    of_beta: Sequence[ArrayLike] | None = None,
) -> Any:
    """[5]'s second part, a Σ_m β_m KL(Q ‖ Q_m).

    `teachers` are the logits whose Q the sub-networks learn, and `of_beta` those that β is of, where they are
    not the functions' own.

    Without a dynamic weight it is a Σ_m KL; here 2 · log 2 = 2 (log 2 - 0):

    >>> float(distillation([[1000.0, 0.0]], [[[0.0, 0.0]]], [0], 2.0, dynamic=False).round(12))
    1.38629436112

    and β is e^-log 2/(1 + e^-log 2) = 1/3:

    >>> float(distillation([[1000.0, 0.0]], [[[0.0, 0.0]]], [0], 2.0).round(12))
    0.462098120373
    >>> distillation([[1.0, 0.0]], [], [0], 2.0)
    0.0
    """
    target = logits if teachers is None else teachers
    total: Any = 0.0
    for sub, weighed in zip(subs, subs if of_beta is None else of_beta, strict=True):
        weight = beta(cross_entropy(weighed, y)) if dynamic else 1.0
        total = total + a * weight * kl(target, sub)
    return total


def client_loss(logits: ArrayLike, subs: Sequence[ArrayLike], y: ArrayLike, a: float, **options: Any) -> Any:
    """[5].

    >>> float(client_loss([[0.0, 0.0]], [[[0.0, 0.0]]], [1], 5.0).round(12))
    0.69314718056
    """
    return cross_entropy(logits, y) + distillation(logits, subs, y, a, **options)


def client_gradients(
    logits: ArrayLike,
    subs: Sequence[ArrayLike],
    y: ArrayLike,
    a: float,
    *,
    dynamic: bool = True,
    detach_target: bool = True,
    detach_weight: bool = True,
) -> tuple[Array, list[Array]]:
    """[5]'s gradients in the logits of the network and of each sub-network.

    A sub-network with equal outputs pulls nothing at all:

    >>> own, (other,) = client_gradients([[0.0, 0.0]], [[[0.0, 0.0]]], [1], 5.0, detach_target=False)
    >>> own.tolist(), other.tolist()
    ([[0.5, -0.5]], [[0.0, 0.0]])

    and a constant target gets cross-entropy's gradient alone; Q_m - Q is the sub-network's, times a β = 1/3:

    >>> own, (other,) = client_gradients([[1000.0, 0.0]], [[[0.0, 0.0]]], [0], 1.0)
    >>> own.tolist(), other.round(12).tolist()
    ([[0.0, 0.0]], [[-0.166666666667, 0.166666666667]])
    """

    def loss(point: Array, others: Sequence[Any]) -> Any:
        return client_loss(
            point,
            others,
            y,
            a,
            dynamic=dynamic,
            teachers=numbers(logits) if detach_target else None,
            of_beta=list(map(numbers, subs)) if detach_weight else None,
        )

    def of_sub(m: int) -> Callable[[Array], Any]:
        return lambda point: loss(numbers(logits), [*subs[:m], point, *subs[m + 1 :]])

    own = gradient(lambda point: loss(point, subs), logits)
    others = [gradient(of_sub(m), sub) for m, sub in enumerate(subs)]
    return own, others


# --- equations 6 to 8 ---


def logits_loss(q: ArrayLike, logits: ArrayLike) -> Any:
    """[6], of the mean of the clients' Q.

    >>> float(logits_loss([[0.5, 0.5]], [[np.log(3), 0.0]]).round(12))
    0.143841036226
    """
    return kl_of(q, log_softmax(logits))


def feature_loss(h: ArrayLike, features: ArrayLike) -> Any:
    """[7]: the mean over rows and features.

    >>> float(feature_loss([[1.0, 2.0], [0.0, 0.0]], [[2.0, 4.0], [0.0, 1.0]]))
    1.5
    """
    return ((numbers(features) - numbers(h)) ** 2).mean()


def server_loss(
    q: ArrayLike, h: ArrayLike, logits: ArrayLike, features: ArrayLike, eta: float, nu: float
) -> Any:
    """[8].

    >>> float(server_loss([[0.5, 0.5]], [[1.0]], [[np.log(3), 0.0]], [[3.0]], 10.0, 0.5).round(12))
    3.438410362259
    """
    return eta * logits_loss(q, logits) + nu * feature_loss(h, features)


# --- nets with one hidden layer, features H = max(W1 x + b1, 0) ---


class Net(NamedTuple):
    """Logits H W2ᵀ + b2."""

    W1: Array
    b1: Array
    W2: Array
    b2: Array


class Samples(NamedTuple):
    x: Array
    y: NDArray[np.int64]


def net(*arrays: ArrayLike) -> Net:
    return Net(*map(numbers, arrays))


def samples(x: ArrayLike, y: ArrayLike) -> Samples:
    rows = numbers(x)
    return Samples(rows.reshape(len(rows), -1), np.asarray(y, dtype=np.int64))


def hidden(x: Array, model: Net) -> Array:
    """H, whose kink is at 0.

    >>> hidden(np.array([[2.0]]), net([[1.0], [-1.0]], [1.0, 1.0], [[0.0, 0.0]], [0.0])).tolist()
    [[3.0, 0.0]]
    """
    before = x @ model.W1.T + model.b1
    return np.asarray(np.where(before.real > 0, before, 0.0))


def outputs(x: Array, model: Net) -> tuple[Array, Array]:
    """H and the logits.

    >>> h, logits = outputs(np.array([[2.0]]), net([[1.0], [-1.0]], [1.0, 1.0], [[2.0, 5.0]], [1.0]))
    >>> h.tolist(), logits.tolist()
    ([[3.0, 0.0]], [[7.0]])
    """
    h = hidden(x, model)
    return h, h @ model.W2.T + model.b2


def shares(weights: Sequence[float]) -> list[float]:
    """p_k of [2].

    >>> shares([1, 3])
    [0.25, 0.75]
    """
    return [w / sum(weights) for w in weights]


def mean(models: Sequence[Net], weights: Sequence[float]) -> Net:
    """[2].

    >>> a, b = net([[1.0]], [0.0], [[2.0]], [4.0]), net([[5.0]], [4.0], [[2.0]], [0.0])
    >>> [array.tolist() for array in mean([a, b], [1, 3])]
    [[[4.0]], [3.0], [[2.0]], [1.0]]
    """
    p = shares(weights)
    return net(*(sum(q * w for q, w in zip(p, part, strict=True)) for part in zip(*models, strict=True)))


def knowledge(x: Array, models: Sequence[Net]) -> tuple[Array, Array]:
    """The clients' mean Q of [6] and mean H of [7], with 1/K each.

    Q = (1, 1)/2 and (3, 1)/4, H = 0 and 2:

    >>> a = net([[0.0]], [0.0], [[0.0], [0.0]], [0.0, 0.0])
    >>> b = net([[2.0]], [0.0], [[np.log(3) / 2], [0.0]], [0.0, 0.0])
    >>> [mean.round(12).tolist() for mean in knowledge(np.array([[1.0]]), [a, b])]
    [[[0.625, 0.375]], [[1.0]]]
    """
    actual = [outputs(x, model) for model in models]
    return (
        np.asarray(sum(softmax(u) for _, u in actual) / len(models)),
        np.asarray(sum(h for h, _ in actual) / len(models)),
    )


def backward(x: Array, model: Net, of_logits: Array, of_hidden: Array | float = 0.0) -> Net:
    """Gradients in the weights from those in the logits and in H.

    >>> rng = np.random.default_rng(0)
    >>> model = net(*(rng.normal(size=s) for s in ((4, 3), 4, (2, 4), 2)))
    >>> x, q, h = rng.normal(size=(5, 3)), softmax(rng.normal(size=(5, 2))), rng.normal(size=(5, 4))
    >>> actual = server_gradient(x, model, q, h, 2.0, 3.0)
    >>> for i, part in enumerate(model):
    ...     def loss(w):
    ...         h_g, u = outputs(x, net(*model[:i], w, *model[i + 1 :]))
    ...         return server_loss(q, h, u, h_g, 2.0, 3.0)
    ...     print(bool(np.allclose(gradient(loss, part), actual[i], rtol=1e-12)))
    True
    True
    True
    True
    """
    before = x @ model.W1.T + model.b1
    h = np.where(before > 0, before, 0.0)
    inner = (of_logits @ model.W2 + of_hidden) * (before > 0)
    return Net(inner.T @ x, inner.sum(axis=0), of_logits.T @ h, of_logits.sum(axis=0))


def server_gradient(x: Array, model: Net, q: Array, h: Array, eta: float, nu: float) -> Net:
    """[8]'s: η (Q_G - Q)/N in the logits, 2 ν (H_G - H)/(N D) in H.

    >>> model = net([[2.0]], [0.0], [[1.0], [0.0]], [0.0, 0.0])
    >>> x = np.array([[1.0]])
    >>> [part.tolist() for part in server_gradient(x, model, *knowledge(x, [model]), 10.0, 0.5)]
    [[[0.0]], [0.0], [[0.0], [0.0]], [0.0, 0.0]]
    """
    features, u = outputs(x, model)
    return backward(x, model, eta * (softmax(u) - q) / len(x), 2 * nu * (features - h) / h.size)


def step(model: Net, slope: Net, rate: float) -> Net:
    return Net(*(w - rate * g for w, g in zip(model, slope, strict=True)))


def train(start: Net, data: Samples, rate: float, epochs: int) -> Net:
    """Full-batch SGD on cross-entropy [1].

    >>> start = net([[1.0]], [0.0], [[0.0], [0.0]], [0.0, 0.0])
    >>> [part.tolist() for part in train(start, samples([[2.0]], [0]), 0.5, 1)]
    [[[1.0]], [0.0], [[0.5], [-0.5]], [0.25, -0.25]]
    """
    model = start
    for _ in range(epochs):
        u = outputs(data.x, model)[1]
        residual = softmax(u)
        residual[np.arange(len(u)), data.y] -= 1
        model = step(model, backward(data.x, model, residual / len(u)), rate)
    return model


def fine_tune(
    start: Net, x: Array, q: Array, h: Array, batches: Sequence[ArrayLike], rate: float, eta: float, nu: float
) -> Net:
    """SGD on [8] with targets that stay; one step per batch of rows."""
    model = start
    for rows in map(np.asarray, batches):
        model = step(model, server_gradient(x[rows], model, q[rows], h[rows], eta, nu), rate)
    return model


def fedhyb(
    start: Net,
    clients: Sequence[Samples],
    proxy: Array,
    batches: Sequence[ArrayLike],
    *,
    rate: float,
    epochs: int,
    server_rate: float,
    eta: float,
    nu: float,
) -> Net:
    """One round of algorithm 1 whose clients train on cross-entropy alone.

    One client teaches itself, and nothing moves:

    >>> start = net([[1.0], [2.0]], [0.0, 0.0], [[1.0, 0.0], [0.0, 0.0]], [0.0, 0.0])
    >>> data = samples([[2.0], [1.0]], [0, 1])
    >>> options = dict(rate=0.5, epochs=3, server_rate=1.0, eta=10.0, nu=0.5)
    >>> alone = fedhyb(start, [data], data.x, [[0, 1]] * 4, **options)
    >>> all(np.allclose(a, b, rtol=0, atol=1e-15) for a, b in zip(alone, train(start, data, 0.5, 3)))
    True
    """
    local = [train(start, data, rate, epochs) for data in clients]
    model = mean(local, [len(data.y) for data in clients])  # [2]
    return fine_tune(model, proxy, *knowledge(proxy, local), batches, server_rate, eta, nu)


# --- affine views ---


def affine(image: ArrayLike, scale: float, degrees: float) -> Array:
    """[K, H, W] scaled and turned counterclockwise about its centre: bilinear, the edge carried on outside.

    The pixel at offset (r, c) from the centre comes from the offset that scaling and turning lead there.

    >>> image = [[[1.0, 2.0], [3.0, 4.0]]]
    >>> affine(image, 1.0, 0.0).tolist(), affine(image, 1.0, 90.0).round(12).tolist()
    ([[[1.0, 2.0], [3.0, 4.0]]], [[[2.0, 4.0], [1.0, 3.0]]])

    Twice as large, what was at 0.5 from the centre is at 1, so 0.5 shows what was at 0.25:

    >>> affine(image, 2.0, 0.0).tolist()
    [[[1.75, 2.25], [2.75, 3.25]]]
    """
    x = numbers(image)
    height, width = x.shape[1:]
    angle = np.deg2rad(degrees)
    out = np.empty_like(x)
    for i in range(height):
        for j in range(width):
            down, right = i - (height - 1) / 2, j - (width - 1) / 2
            # Turned back by the angle, where up is -down.
            right_0 = (right * np.cos(angle) - down * np.sin(angle)) / scale
            down_0 = (right * np.sin(angle) + down * np.cos(angle)) / scale
            r = min(max(down_0 + (height - 1) / 2, 0.0), height - 1.0)
            c = min(max(right_0 + (width - 1) / 2, 0.0), width - 1.0)
            r0, c0 = int(r), int(c)
            r1, c1 = min(r0 + 1, height - 1), min(c0 + 1, width - 1)
            fr, fc = r - r0, c - c0
            out[:, i, j] = (1 - fr) * ((1 - fc) * x[:, r0, c0] + fc * x[:, r0, c1]) + fr * (
                (1 - fc) * x[:, r1, c0] + fc * x[:, r1, c1]
            )
    return out


# --- FedHyb*'s generator: the losses that train it without data ---


def absolute(values: Array) -> Array:
    """|x|, analytic but for its kink.

    >>> absolute(np.array([-2.0, 3.0])).tolist()
    [2.0, 3.0]
    """
    return np.asarray(np.where(values.real < 0, -values, values))


def confidence(p: ArrayLike, y: ArrayLike) -> Any:
    """Mean over the rows of -log(p_y + 1e-12), of probabilities.

    >>> float(confidence([[0.25, 0.75], [1.0, 0.0]], [0, 0]).round(9))
    0.693147181
    """
    rows = numbers(p)
    return -np.log(rows[np.arange(len(rows)), np.asarray(y)] + 1e-12).mean()


def balance(p: ArrayLike) -> Any:
    """log C - H(p̄), where 0 log 0 = 0.

    >>> float(balance([[1.0, 0.0], [0.5, 0.5]]).round(12))  # log 2 - H(3/4, 1/4)
    0.130812035941
    >>> float(balance([[1.0, 0.0], [0.0, 1.0]]).round(12))
    0.0
    """
    mean_p = numbers(p).mean(axis=0)
    some = mean_p.real > 0
    return np.log(len(mean_p)) + (mean_p * np.log(np.where(some, mean_p, 1.0))).sum()


def diversity(x: ArrayLike, z: ArrayLike, y: ArrayLike) -> Any:
    """exp(-mean of |x_i - x_j| |z_i - z_j|) over the pairs i < j of one class, |·| a mean over numbers.

    One pair, 3 and 2 apart:

    >>> float(diversity([[0.0, 0.0], [2.0, 4.0], [9.0, 9.0]], [[1.0], [3.0], [0.0]], [0, 0, 1]).round(12))
    0.002478752177
    >>> diversity([[0.0], [1.0]], [[0.0], [1.0]], [0, 1])
    1.0
    """
    a, b, labels = numbers(x), numbers(z), np.asarray(y)
    products = [
        absolute(a[i] - a[j]).mean() * absolute(b[i] - b[j]).mean()
        for i in range(len(labels))
        for j in range(i)
        if labels[i] == labels[j]
    ]
    return np.exp(-sum(products) / len(products)) if products else 1.0


def statistics(x: ArrayLike, running_mean: ArrayLike, running_var: ArrayLike) -> Any:
    """Mean squared distance over the channels, of means and of (biased) variances, of [B, K, ...].

    Channel 0 has mean 2 and variance 1, channel 1 has 0 and 0: (1 + 0)/2 + (4 + 1)/2.

    >>> float(statistics([[1.0, 0.0], [3.0, 0.0]], [1.0, 0.0], [3.0, 1.0]))
    3.0
    """
    rows = np.moveaxis(numbers(x), 1, 0)
    rows = rows.reshape(len(rows), -1)
    means = rows.mean(axis=1)
    variances = ((rows - means[:, None]) ** 2).mean(axis=1)
    return ((means - numbers(running_mean)) ** 2).mean() + ((variances - numbers(running_var)) ** 2).mean()
