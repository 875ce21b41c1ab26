"""An app's ``README.md``."""

from __future__ import annotations

from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from flwr_kd.app_files.traits import Traits
from flwr_kd.registry import Method

if TYPE_CHECKING:
    from flwr_kd.app_files.project import AppProject

__all__ = ["page"]


def page(project: AppProject) -> str:
    """Return the text of ``README.md``."""
    traits = project.traits
    text = files("flwr_kd.app_files").joinpath("page.md").read_text(encoding="utf-8")
    several = (
        " `method` chooses the method. A value that it fixes replaces the default without a message, and any other "
        "value is refused."
    )
    return Template(text).substitute(
        title=project.title,
        place=project.place,
        package=project.package,
        first=project.methods[0].name,
        methods="\n\n".join(map(_described, project.methods)),
        needed=" and ".join(f"`{name}`" for name in ("flwr-kd[simulation]", *traits.plugins)),
        several=several if len(project.methods) > 1 else "",
        owners=_owners(traits),
        own=_own_data(traits),
    )


def _described(method: Method) -> str:
    models = (
        "Clients may have different models." if method.heterogeneous else "All clients have the same model."
    )
    sent = f"`{method.name}`: {method.paper}. Sent: {method.exchanged}. {models}"
    if not method.leaves_client:
        return sent
    others = f" What goes on to other clients: {method.reaches_others}." if method.reaches_others else ""
    return f"{sent}\n\n**What leaves a client:** {method.leaves_client}.{others}"


def _owners(traits: Traits) -> str:
    """Return what the owner of a SuperNode decides, in its node config."""
    text = ""
    if any(each.name == "global-model" for each in traits.hyper_parameters):
        text += (
            '\n\nWith `global-model="average"` the server asks for the clients\' models, to measure their mean. A '
            "SuperNode sends its model only if its owner allows it, with `share-model=true` in its node config. A "
            "simulation needs no permission."
        )
    if traits.heterogeneous:
        text += (
            "\n\n`model` in a node config, for example `model='lenet'` beside `partition-id`, selects a client's "
            "model among those of the run."
        )
    return text


def _own_data(traits: Traits) -> str:
    texts = []
    if "server" in traits.public_at:
        texts.append("The server needs public data, which has no default in this case: set `public`.")
    if "clients" in traits.public_at:
        texts.append(
            "Public data has no default in this case: set `public`, with the same samples at all clients and at "
            "the server, or with `public-at='server'` at the server only."
        )
    if traits.measures_model:
        texts.append("The server measures its model if `test-path` names test data there.")
    return f"\n{' '.join(texts)}\n" if texts else ""
