"""Messages and replies: what is written, and that readers of untrusted replies raise nothing else."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.compat.common import recorddict_compat as compat
from flwr.compat.common.parameter import ndarrays_to_parameters
from flwr.compat.common.typing import Code, EvaluateRes, FitRes, Status
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_kd.transport import flower_records
from flwr_kd.transport.npy import read_array
from flwr_kd.transport.payload import PayloadError
from flwr_kd.transport.template import ArrayTemplate
from flwr_kd.transport.wire_version import WIRE_VERSION

repeatable = settings(max_examples=100, deadline=None, derandomize=True)
JSON_LEAVES = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3)
OK = Status(Code.OK, "")


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Message(...) asks for the process's identity, which Flower's runtimes set."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def _reply(content: RecordDict) -> Message:
    return Message(content, dst_node_id=1, message_type="train")


def _npy(value: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value, allow_pickle=value.dtype.hasobject)
    return stream.getvalue()


def _header(text: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    line = text.encode("latin1") + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H" if version[0] == 1 else "<I", len(line)) + line + body


def _array(data: bytes) -> Array:
    return Array("float32", (1,), "numpy.ndarray", data)


def _train(
    arrays: dict[str, Array] | None = None, examples: Any = 3, metrics: dict[str, Any] | None = None
) -> Message:
    return _reply(
        RecordDict(
            {
                "fitres.parameters": ArrayRecord(arrays or {}),
                "fitres.num_examples": MetricRecord({"num_examples": examples}),
                "fitres.metrics": ConfigRecord(metrics or {}),
            }
        )
    )


def _evaluate(loss: Any = 0.5, examples: Any = 3, metrics: dict[str, Any] | None = None) -> Message:
    return _reply(
        RecordDict(
            {
                "evaluateres.loss": MetricRecord({"loss": loss}),
                "evaluateres.num_examples": MetricRecord({"num_examples": examples}),
                "evaluateres.metrics": ConfigRecord(metrics or {}),
            }
        )
    )


class TestMessages:
    def test_flower_reads_what_we_write(self) -> None:
        record = ArrayRecord([np.arange(3.0), np.array(2)])
        message = flower_records.train_message(
            7, arrays=record, config={"server-round": 2, "phase": "train"}, payload=b"abc", group_id="2"
        )
        ins = compat.recorddict_to_fitins(message.content, keep_input=True)
        assert ins.config == {"server-round": 2, "phase": "train", "payload": b"abc"}
        assert len(ins.parameters.tensors) == 2
        assert (message.metadata.dst_node_id, message.metadata.message_type) == (7, "train")
        assert message.metadata.group_id == "2"

    def test_evaluate_and_properties(self) -> None:
        evaluate = flower_records.evaluate_message(3, arrays=None, config={"phase": "x"}, ttl=12.5)
        assert compat.recorddict_to_evaluateins(evaluate.content, keep_input=True).config == {"phase": "x"}
        assert (evaluate.metadata.message_type, evaluate.metadata.ttl) == ("evaluate", 12.5)
        ask = flower_records.properties_message(4, config={"seed": 1})
        config = compat.recorddict_to_getpropertiesins(ask.content).config
        assert config == {"seed": 1, "wire-version": WIRE_VERSION}
        assert ask.metadata.message_type == "get_properties"

    def test_no_arrays_and_no_payload(self) -> None:
        message = flower_records.train_message(1, arrays=None, config={"phase": "train"})
        ins = compat.recorddict_to_fitins(message.content, keep_input=True)
        assert ins.parameters.tensors == []
        assert ins.config == {"phase": "train"}

    def test_config_is_not_shared(self) -> None:
        config = {"server-round": 1}
        first = flower_records.train_message(1, arrays=None, config=config, payload=b"own")
        second = flower_records.train_message(2, arrays=None, config=config)
        first.content.config_records["fitins.config"]["server-round"] = 99
        assert config == {"server-round": 1}
        assert dict(second.content.config_records["fitins.config"]) == {"server-round": 1}

    def test_nbytes_counts_arrays_and_byte_values(self) -> None:
        record = ArrayRecord({"a": Array(np.zeros(10, np.float32)), "b": Array(np.zeros((2, 2)))})
        message = flower_records.train_message(
            1, arrays=record, config={"x": 1.0, "t": "text"}, payload=bytes(50)
        )
        expected = len(_npy(np.zeros(10, np.float32))) + len(_npy(np.zeros((2, 2)))) + 50
        assert flower_records.nbytes(message.content) == expected
        assert flower_records.nbytes(RecordDict()) == 0


class TestReplies:
    def test_what_flower_writes(self) -> None:
        sent = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(5), np.array([True, False])]
        metrics = {"train-loss": 0.25, "epochs": 3, "note": "text", "flag": True, "payload": b"xyz"}
        content = compat.fitres_to_recorddict(
            FitRes(OK, ndarrays_to_parameters(sent), 12, metrics), keep_input=True
        )
        reply = flower_records.read_train_reply(_reply(content))
        assert (reply.num_examples, reply.payload) == (12, b"xyz")
        assert reply.metrics == {"train-loss": 0.25, "epochs": 3.0}
        assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(reply.arrays, sent, strict=True))
        assert all(np.array_equal(a, b) for a, b in zip(reply.arrays, sent, strict=True))
        assert reply.nbytes == sum(len(_npy(value)) for value in sent) + 3

    def test_no_arrays_come_back_as_flowers_empty_entry(self) -> None:
        content = compat.fitres_to_recorddict(FitRes(OK, ndarrays_to_parameters([]), 1, {}), keep_input=True)
        assert list(content.array_records["fitres.parameters"]) == ["_empty"]
        assert flower_records.read_train_reply(_reply(content)).arrays == []
        assert ArrayTemplate.of(content.array_records["fitres.parameters"]) == ArrayTemplate()

    def test_an_array_record_with_nothing_in_it(self) -> None:
        reply = flower_records.read_train_reply(_train())
        assert (reply.arrays, reply.payload, reply.nbytes) == ([], None, 0)
        assert ArrayTemplate.of(ArrayRecord()) == ArrayTemplate()

    def test_evaluate(self) -> None:
        content = compat.evaluateres_to_recorddict(EvaluateRes(OK, 0.75, 9, {"accuracy": 0.5, "s": "x"}))
        assert flower_records.read_evaluate_reply(_reply(content)) == flower_records.EvaluateReply(
            0.75, 9, {"accuracy": 0.5}
        )

    def test_properties(self) -> None:
        sent: dict[str, Any] = {"a": 1, "b": "x", "wire-version": WIRE_VERSION}
        content = RecordDict({"getpropertiesres.properties": ConfigRecord(sent)})
        assert flower_records.read_properties(_reply(content)) == sent

    @pytest.mark.parametrize(
        ("version", "text"),
        [
            (None, r"the client names no wire version, as flwr-kd before 0.2; the server's is 2: update"),
            (1, r"the client's wire version is 1, the server's is 2: install the same version of flwr-kd"),
            (3, r"the client's wire version is 3, the server's is 2: install"),
            ("2", r"the client's wire version is '2', the server's is 2"),
            (2.0, r"the client's wire version is 2.0, the server's is 2"),
            (True, r"the client's wire version is True, the server's is 2"),
        ],
    )
    def test_another_version_of_the_wire_is_refused(self, version: Any, text: str) -> None:
        named = {} if version is None else {"wire-version": version}
        content = RecordDict({"getpropertiesres.properties": ConfigRecord(named)})
        with pytest.raises(PayloadError, match=text):
            flower_records.read_properties(_reply(content))

    @pytest.mark.parametrize(
        "read",
        [flower_records.read_train_reply, flower_records.read_evaluate_reply, flower_records.read_properties],
        ids=lambda f: f.__name__,
    )
    def test_nothing_in_the_reply(self, read: Callable[[Message], Any]) -> None:
        with pytest.raises(PayloadError, match=r"record '.*' is missing"):
            read(_reply(RecordDict()))
        asked = flower_records.properties_message(1, config={})
        asked.metadata.__dict__["_message_id"] = "m"
        with pytest.raises(PayloadError, match="no content"):
            read(Message(Error(0, "broken"), reply_to=asked))

    @pytest.mark.parametrize("missing", ["fitres.parameters", "fitres.num_examples", "fitres.metrics"])
    def test_a_record_is_missing_or_of_another_kind(self, missing: str) -> None:
        message = _train()
        message.content.pop(missing)
        with pytest.raises(PayloadError, match=f"record '{missing}' is missing"):
            flower_records.read_train_reply(message)
        message.content[missing] = ConfigRecord() if missing != "fitres.metrics" else ArrayRecord()
        with pytest.raises(PayloadError, match=f"record '{missing}' is missing"):
            flower_records.read_train_reply(message)

    @pytest.mark.parametrize("examples", [-1, 2**53 + 1, 10**400, 1.0, [3]])
    def test_num_examples(self, examples: Any) -> None:
        for read, message in [
            (flower_records.read_train_reply, _train(examples=examples)),
            (flower_records.read_evaluate_reply, _evaluate(examples=examples)),
        ]:
            with pytest.raises(PayloadError, match="num_examples must be a whole number from 0 to 90071"):
                read(message)

    def test_num_examples_without_the_key(self) -> None:
        message = _train()
        message.content["fitres.num_examples"] = MetricRecord({"other": 1})
        with pytest.raises(PayloadError, match=r"num_examples .* got None"):
            flower_records.read_train_reply(message)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400])
    def test_numbers_must_be_finite(self, value: float) -> None:
        with pytest.raises(PayloadError, match="metric 'train-loss' must be finite"):
            flower_records.read_train_reply(_train(metrics={"train-loss": value}))
        with pytest.raises(PayloadError, match="metric 'accuracy' must be finite"):
            flower_records.read_evaluate_reply(_evaluate(metrics={"accuracy": value}))
        with pytest.raises(PayloadError, match="loss must be a finite number"):
            flower_records.read_evaluate_reply(_evaluate(loss=value))

    def test_loss_must_be_a_number(self) -> None:
        with pytest.raises(PayloadError, match=r"loss must be a finite number within .*, got a list"):
            flower_records.read_evaluate_reply(_evaluate(loss=[0.5]))

    @pytest.mark.parametrize("payload", ["text", 1, 0.5, True, [b"x"]])
    def test_payload_must_be_bytes(self, payload: Any) -> None:
        with pytest.raises(PayloadError, match="'payload' must be bytes, got"):
            flower_records.read_train_reply(_train(metrics={"payload": payload}))


class TestArrayBytes:
    """The reader of numpy's format."""

    @staticmethod
    def read(data: bytes) -> np.ndarray:
        (value,) = flower_records.read_train_reply(_train({"0": _array(data)})).arrays
        return value

    @repeatable
    @given(
        hnp.arrays(
            hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
        ).filter(lambda a: a.dtype.itemsize > 0),
        st.booleans(),
    )
    def test_same_as_numpy(self, value: np.ndarray, fortran: bool) -> None:
        data = _npy(np.asfortranarray(value) if fortran and value.ndim else value)
        back, expected = self.read(data), np.load(io.BytesIO(data))
        assert (back.dtype, back.shape) == (expected.dtype, expected.shape)
        assert back.tobytes() == expected.tobytes()

    def test_version_two(self) -> None:
        text = "{'descr': '<i4', 'fortran_order': False, 'shape': (2,)}"
        assert self.read(_header(text, struct.pack("<ii", 1, 2), b"\x02\x00")).tolist() == [1, 2]

    def test_objects_are_refused_without_unpickling(self) -> None:
        class Bomb:
            def __reduce__(self) -> tuple[Any, ...]:
                return pytest.fail, ("unpickled",)

        value = np.empty(1, dtype=object)
        value[0] = Bomb()
        with pytest.raises(PayloadError, match=r"array '0' is not a numpy array .*objects are not allowed"):
            self.read(_npy(value))
        structured = "{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,)}"
        with pytest.raises(PayloadError, match="objects are not allowed"):
            self.read(_header(structured, bytes(8)))

    @pytest.mark.parametrize("shape", ["(1000000000,)", "(2**40,)", f"({2**40},)", f"({2**62}, {2**62})"])
    def test_a_giant_shape_allocates_nothing(self, shape: str) -> None:
        data = _header(f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}", bytes(64))
        tracemalloc.start()
        try:
            with pytest.raises(PayloadError, match="is not a numpy array"):
                self.read(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 10**6

    @pytest.mark.parametrize(
        "text",
        [
            "(((",
            "'''",
            "",
            "None",
            "[" * 5000,
            "-" * 9000 + "1",
            "{'descr': (), 'fortran_order': False, 'shape': ()}",
            "{'descr': [()], 'fortran_order': False, 'shape': ()}",
            "{'descr': None, 'fortran_order': False, 'shape': ()}",
            "{'descr': 'nonsense', 'fortran_order': False, 'shape': ()}",
            "{'descr': '|V0', 'fortran_order': False, 'shape': (10,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -1)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': 1}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 1180591620717411303424)}",
            "{'descr': '<f4', 'fortran_order': 2, 'shape': (1,)}",
            "{'descr': '<f4', 'shape': (1,)}",
            "{[1]: 2}",
            "{" + "1:" * 4000,
        ],
    )
    def test_bad_headers(self, text: str) -> None:
        for version in (b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09"):
            with pytest.raises(PayloadError, match="array '0' is not a numpy array"):
                self.read(_header(text, bytes(4), version))

    def test_truncated_or_too_long(self) -> None:
        data = _npy(np.arange(3.0))
        for end in range(len(data)):
            with pytest.raises(PayloadError):
                self.read(data[:end])
        with pytest.raises(PayloadError, match="25 bytes for shape"):
            self.read(data + b"\0")

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(
        data=st.binary(max_size=120), edits=st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=4)))
    )
    def test_garbage(self, data: bytes, edits: list[tuple[int, bytes]]) -> None:
        mutated = _npy(np.arange(4, dtype=np.float32).reshape(2, 2))
        for place, new in edits:
            place %= len(mutated)
            mutated = mutated[:place] + new + mutated[place + len(new) :]
        template = ArrayTemplate(("w",), ("float32",), ((2, 2),))
        for given_ in (data, b"\x93NUMPY\x01\x00" + data, mutated):
            try:
                checked = template.check([read_array("w", _array(given_))])
            except PayloadError:
                continue
            assert (checked[0].dtype, checked[0].shape) == (np.float32, (2, 2))
            assert np.isfinite(checked[0]).all()

    def test_long_names_are_cut_in_the_error(self) -> None:
        with pytest.raises(PayloadError) as caught:
            flower_records.read_train_reply(_train({"n" * 10_000: _array(b"")}))
        assert len(str(caught.value)) < 400


MODEL = {
    "weight": np.zeros((2, 3), np.float32),
    "counter": np.array(7, dtype=np.int64),
    "mask": np.array([True, False]),
}
TEMPLATE = ArrayTemplate.of_ndarrays(MODEL)


class TestTemplate:
    @staticmethod
    def check(**changes: Any) -> list[np.ndarray]:
        return TEMPLATE.check([np.asarray(value) for value in (MODEL | changes).values()])

    def test_of_a_real_model(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        record = ArrayRecord(model.state_dict())
        template = ArrayTemplate.of(record)
        assert template.names == tuple(model.state_dict())
        assert template.shapes[template.names.index("1.num_batches_tracked")] == ()
        assert template.dtypes[template.names.index("1.num_batches_tracked")] == "int64"
        back = template.record([value.numpy() for value in record.values()])
        model.load_state_dict(back.to_torch_state_dict(), strict=True)

    def test_unchanged_arrays(self) -> None:
        for before, after in zip(MODEL.values(), self.check(), strict=True):
            assert (after.dtype, after.shape) == (before.dtype, before.shape)
            assert np.array_equal(after, before)

    @pytest.mark.parametrize(
        "value",
        [
            np.array([9]),
            np.array(9.0),
            np.array([9.0], np.float32),
            np.array(9, np.uint8),
            np.array([9], np.int32),
        ],
        ids=repr,
    )
    def test_counter_is_put_right(self, value: np.ndarray) -> None:
        counter = self.check(counter=value)[1]
        assert (counter.dtype, counter.shape, counter.item()) == (np.int64, (), 9)

    @pytest.mark.parametrize("value", [9.5, 1e300, 2.0**63, np.uint64(2**64 - 1), -0.25])
    def test_counter_that_is_not_whole_or_does_not_fit(self, value: float) -> None:
        with pytest.raises(PayloadError, match="'counter' has values that are not whole, expected int64"):
            self.check(counter=value)

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"counter": np.array([1, 2])}, r"'counter' has shape \[2\], expected \[\]"),
            ({"counter": np.array([[1]])}, r"'counter' has shape \[1, 1\], expected \[\]"),
            ({"counter": np.nan}, "'counter' has values that are not finite"),
            ({"weight": np.zeros((3, 2), np.float32)}, r"'weight' has shape \[3, 2\], expected \[2, 3\]"),
            ({"weight": np.zeros(6, np.float32)}, r"'weight' has shape \[6\]"),
            ({"weight": np.full((2, 3), np.nan, np.float32)}, "'weight' has values that are not finite"),
            ({"weight": np.full((2, 3), -np.inf)}, "'weight' has values that are not finite"),
            ({"weight": np.full((2, 3), 1e300)}, "'weight' has values beyond float32"),
            ({"weight": np.zeros((2, 3), np.complex64)}, "'weight' has dtype complex64, expected float32"),
            ({"weight": np.full((2, 3), "x")}, "'weight' has dtype str"),
            ({"weight": np.zeros((2, 3), "M8[s]")}, "'weight' has dtype datetime64"),
            ({"mask": np.array([2, 0])}, "'mask' has values that are not whole, expected bool"),
        ],
    )
    def test_refused(self, changes: dict[str, Any], text: str) -> None:
        with pytest.raises(PayloadError, match=text):
            self.check(**changes)

    def test_number_of_arrays(self) -> None:
        values = list(MODEL.values())
        for wrong in ([], values[:2], [*values, values[0]]):
            with pytest.raises(PayloadError, match=f"{len(wrong)} arrays came back, expected 3"):
                TEMPLATE.check(wrong)

    def test_wider_floats_are_cast(self) -> None:
        weight = self.check(weight=np.full((2, 3), 0.1))[0]
        assert weight.dtype == np.float32
        assert (weight == np.float32(0.1)).all()

    def test_scalar_weight_of_one_element(self) -> None:
        template = ArrayTemplate(("scale",), ("float32",), ((),))
        (scale,) = template.check([np.array([0.5], np.float32)])
        assert (scale.shape, scale.item()) == ((), 0.5)
        with pytest.raises(PayloadError, match=r"has shape \[\], expected \[1\]"):
            ArrayTemplate(("scale",), ("float32",), ((1,),)).check([np.array(0.5, np.float32)])

    def test_json_round_trip(self) -> None:
        assert ArrayTemplate.from_json(TEMPLATE.to_json()) == TEMPLATE
        assert ArrayTemplate.from_json(ArrayTemplate().to_json()) == ArrayTemplate()

    @pytest.mark.parametrize(
        "text",
        [None, 3, b"\xff", "", "{}", "[]", "[1, 2, 3]", "[[], []]", '[["a"], ["f"], [[Infinity]]]', "[" * 100_000,
         '[["a"], ["f"], [["x"]]]', '[["a"], [], []]', '[["a"], ["f"], [3]]', '[["a"], ["f"], [[NaN]]]', [1]],
        ids=lambda text: repr(text)[:30],
    )  # fmt: skip
    def test_json_that_is_something_else(self, text: Any) -> None:
        with pytest.raises(PayloadError, match="'arrays'"):
            ArrayTemplate.from_json(text)

    @repeatable
    @given(
        st.text(max_size=30)
        | st.lists(JSON_LEAVES | st.lists(JSON_LEAVES | st.lists(JSON_LEAVES))).map(json.dumps)
    )
    def test_json_of_anything(self, text: str) -> None:
        try:
            template = ArrayTemplate.from_json(text)
        except PayloadError:
            return
        assert len(template.names) == len(template.dtypes) == len(template.shapes)
        assert template.difference(template) is None

    def test_difference_goes_by_name(self) -> None:
        turned = ArrayTemplate.of_ndarrays(dict(reversed(MODEL.items())))
        assert turned.names != TEMPLATE.names
        assert TEMPLATE.difference(turned) is None
        assert turned.difference(TEMPLATE) is None

    def test_difference_of_names_and_shapes(self) -> None:
        fewer = ArrayTemplate.of_ndarrays({"weight": MODEL["weight"], "other": MODEL["mask"]})
        text = "arrays missing ['counter', 'mask'], not expected ['other']"
        assert TEMPLATE.difference(fewer) == text
        wider = ArrayTemplate.of_ndarrays(MODEL | {"weight": np.zeros((2, 4))})
        assert TEMPLATE.difference(wider) == "array 'weight' has shape [2, 4], expected [2, 3]"

    def test_difference_ignores_dtypes(self) -> None:
        assert TEMPLATE.difference(ArrayTemplate.of_ndarrays(MODEL | {"weight": np.zeros((2, 3))})) is None

    def test_record_of_too_few_arrays(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            TEMPLATE.record([MODEL["weight"]])
