"""Tables of network flows, from small files with the columns of the real ones."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from flwr_kd.data import DataError, Selection, load, load_public
from flwr_kd.wording import begin_run


def of(name: str, *endings: str) -> list[str]:
    return [f"{name}.{ending}" for ending in endings]


BULK = ("Avg.Bytes.Bulk", "Avg.Packets.Bulk", "Avg.Bulk.Rate")
SPREAD = ("Mean", "Std", "Max", "Min")
FLOWS_75 = [
    *("Flow.ID", "Source.IP", "Source.Port", "Destination.IP", "Destination.Port", "Protocol", "Timestamp"),
    *("Flow.Duration", "Total.Fwd.Packets", "Total.Backward.Packets"),
    *("Total.Length.of.Fwd.Packets", "Total.Length.of.Bwd.Packets"),
    *of("Fwd.Packet.Length", "Max", "Min", "Mean", "Std"),
    *of("Bwd.Packet.Length", "Max", "Min", "Mean", "Std"),
    *("Flow.Bytes.s", "Flow.Packets.s"),
    *of("Flow.IAT", *SPREAD),
    *of("Fwd.IAT", "Total", *SPREAD),
    *of("Bwd.IAT", "Total", *SPREAD),
    *("Fwd.PSH.Flags", "Bwd.PSH.Flags", "Fwd.URG.Flags", "Bwd.URG.Flags"),
    *("Fwd.Header.Length", "Bwd.Header.Length", "Fwd.Packets.s", "Bwd.Packets.s"),
    *("Min.Packet.Length", "Max.Packet.Length", *of("Packet.Length", "Mean", "Std", "Variance")),
    *(f"{flag}.Flag.Count" for flag in ("FIN", "SYN", "RST", "PSH", "ACK", "URG", "CWE", "ECE")),
    *("Down.Up.Ratio", "Average.Packet.Size", "Avg.Fwd.Segment.Size", "Avg.Bwd.Segment.Size"),
    *("Fwd.Header.Length.1", *of("Fwd", *BULK), *of("Bwd", *BULK)),
    *of("Subflow", "Fwd.Packets", "Fwd.Bytes", "Bwd.Packets", "Bwd.Bytes"),
    *("Init_Win_bytes_forward", "Init_Win_bytes_backward", "act_data_pkt_fwd", "min_seg_size_forward"),
    *of("Active", *SPREAD),
    *of("Idle", *SPREAD),
    *("Label", "L7Protocol", "ProtocolName"),
]
COUNTS = [
    *("pktTotalCount", "octetTotalCount", "min_ps", "max_ps", "avg_ps", "std_dev_ps"),
    *("flowStart", "flowEnd", "flowDuration", "min_piat", "max_piat", "avg_piat", "std_dev_piat"),
]
FLOWS_141 = [
    *("flow_key", "src_ip_numeric", "src_ip", "src_port", "dst_ip", "dst_port", "proto"),
    *(f"{side}{name}" for side in ("", "f_", "b_") for name in COUNTS),
    *("flowEndReason", "category", "application_protocol", "web_service"),
]
TEXTS = {
    "Flow.ID": "172.19.1.46-10.200.7.7-52422-3128-6", "Source.IP": "172.19.1.46", "Destination.IP": "10.200.7.7",
    "Timestamp": "26/04/201711:11:17", "Label": "BENIGN", "ProtocolName": "HTTP_PROXY",
    "flow_key": "3acee4f4ea001cd5e6d9584d4036b53d", "src_ip": "192.168.121.2", "dst_ip": "192.168.121.1",
    "category": "Network", "application_protocol": "DNS",
}  # fmt: skip
FILES = {
    "unicauca75": ("Dataset-Unicauca-Version2-87Atts.csv", FLOWS_75, "L7Protocol", ["131", "7", "130"]),
    "unicauca141": (
        "Unicauca-dataset-April-June-2019-Network-flows.csv", FLOWS_141, "web_service", ["Google", "DNS", "Amazon"],
    ),
}  # fmt: skip


def write(folder: Path, name: str, rows: int = 90, missing: int = 0) -> np.ndarray:
    """Write a file in the set's form, and return its features."""
    file, columns, label, classes = FILES[name]
    features = [column for column in columns if column not in {*TEXTS, label}]
    numbers = np.random.default_rng(0).integers(0, 10**6, (rows, len(features))).astype(float)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / file, "w", newline="") as target:
        writer = csv.DictWriter(target, columns)
        writer.writeheader()
        for i, row in enumerate(numbers):
            cells = TEXTS | dict(zip(features, row.tolist(), strict=True)) | {label: classes[i % 3]}
            if i < missing:
                cells[features[i % len(features)]] = ("", "NaN", "Infinity")[i % 3]
            writer.writerow({column: cells[column] for column in columns})
    return numbers


@pytest.mark.parametrize(
    ("name", "folder", "width"), [("unicauca75", "", 80), ("unicauca141", "unicauca141", 44)]
)
def test_flows_have_all_numbers_and_no_name_of_their_label(
    tmp_path: Path, name: str, folder: str, width: int
) -> None:
    numbers = write(tmp_path / folder, name, missing=6)
    bundle = load(name, data_dir=str(tmp_path))
    public = load_public(None, dataset=name, data_dir=str(tmp_path))
    assert (bundle.num_classes, bundle.input_shape) == (3, (width,))
    assert (len(bundle.train), len(bundle.test), len(public)) == (52, 16, 16)
    mean, std = bundle.train.x.double().mean(0), bundle.train.x.double().std(0, correction=0)
    assert mean.abs().max() < 1e-5
    assert (std - 1).abs().max() < 1e-5
    # All rows without a missing value are there, with classes in the order of their names.
    x = torch.cat([bundle.train.x, bundle.test.x, public.x]).double()
    y = torch.cat([bundle.train.y, bundle.test.y, public.y])
    whole = numbers[6:]
    correlated = np.corrcoef(x.numpy(), (whole - whole.mean(0)) / whole.std(0))[: len(x), len(x) :]
    found = correlated.argmax(axis=1)
    assert sorted(found.tolist()) == list(range(84))
    classes = sorted(FILES[name][3])
    assert [classes[label] for label in y] == [FILES[name][3][(row + 6) % 3] for row in found]


def test_flows_can_be_limited_per_class(tmp_path: Path) -> None:
    write(tmp_path, "unicauca75")
    bundle = load("unicauca75", data_dir=str(tmp_path), selection=Selection(class_limit=20, held=9))
    assert (len(bundle.train), len(bundle.test)) == (39, 12)


def test_files_that_are_missing_or_of_another_form_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"'unicauca75' needs the file Dataset-Unicauca-Version2-87Atts.csv or "
    ):
        load("unicauca75", data_dir=str(tmp_path))
    with pytest.raises(DataError, match=r'in a folder that data_dir="FOLDER" names'):
        load("unicauca141")
    (tmp_path / "unicauca75.csv").write_text("a,b,L7Protocol\n1,2,7\n")
    with pytest.raises(
        DataError, match=r"must have a column 'L7Protocol' and 80 columns of numbers .* got 3 columns"
    ):
        load("unicauca75", data_dir=str(tmp_path))
    write(tmp_path, "unicauca75")
    file = tmp_path / FILES["unicauca75"][0]
    lines = file.read_text().splitlines()
    file.write_text(
        "\n".join([*lines[:5], lines[5].replace("52422-3128-6,172.19.1.46,", "x,y,z"), *lines[6:]])
    )
    with pytest.raises(
        DataError, match=r"87Atts.csv, line 6, column 'Source.Port': 'z476566.0' is not a number"
    ):
        load("unicauca75", data_dir=str(tmp_path))
    file.write_text(lines[0] + "\n")
    with pytest.raises(
        DataError, match=r"87Atts.csv has no row with a label and a number in each column, of 0"
    ):
        load("unicauca75", data_dir=str(tmp_path))


def test_rows_that_are_left_out_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "unicauca75")
    file = tmp_path / FILES["unicauca75"][0]
    whole = load("unicauca75", data_dir=str(tmp_path))
    caplog.clear()
    begin_run()
    with file.open(newline="") as table:
        header, first, *rows = csv.reader(table)
    port = header.index("Source.Port")
    broken = [[*first[:port], cell, *first[port + 1 :]] for cell in ("", "inf")]
    with file.open("w", newline="") as table:
        csv.writer(table).writerows([header, first, *rows, *broken])
    assert len(load("unicauca75", data_dir=str(tmp_path)).train) == len(whole.train)
    (said,) = {record.getMessage() for record in caplog.records}
    assert "87Atts.csv: 2 of " in said
    assert "rows are left out: they lack a label or a finite number" in said


def test_public_flows_of_another_set_do_not_fit(tmp_path: Path) -> None:
    for name in FILES:
        write(tmp_path, name)
    with pytest.raises(DataError, match=r"44 features cannot replace one with 80"):
        load_public("unicauca141", dataset="unicauca75", data_dir=str(tmp_path))
