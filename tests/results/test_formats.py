"""Tables as CSV, Markdown and LaTeX: whole, and with what each must escape."""

from __future__ import annotations

import csv
import io

import pytest
from pylatexenc.latex2text import LatexNodes2Text
from pylatexenc.latexwalker import LatexWalker

from flwr_kd.results.errors import ResultError
from flwr_kd.results.formats import csv_text, latex_cell, latex_text, markdown_cell, markdown_text
from flwr_kd.results.schema import Comparison
from tests.results.examples import a_comparison, a_round, a_run

HARD = '[a]_b\\c {d} $e$ #f ~g ^h <i> a&b|c*d `e` 10%, "q" -1.5'


def example() -> Comparison:
    """Two seeds of a method, and of one with a hard name whose global accuracy only one seed has."""
    first = [
        a_run(seed=seed, rounds=(a_round(local_accuracy=value, global_accuracy=value / 2),))
        for seed, value in enumerate([0.5, 0.75])
    ]
    second = [
        a_run(HARD, seed, rounds=(a_round(local_accuracy=0.5, global_accuracy=0.25 if seed else None),))
        for seed in (0, 1)
    ]
    return a_comparison(*first, *second)


NAMES = ["local-accuracy", "global-accuracy", "bytes-up"]


def test_csv_has_all_digits_and_is_read_back() -> None:
    text = csv_text(example(), NAMES)
    assert text.splitlines()[:2] == [
        "method,seeds,local_accuracy_mean,local_accuracy_std,local_accuracy_n,local_accuracy_difference,"
        "local_accuracy_low,local_accuracy_high,global_accuracy_mean,global_accuracy_std,global_accuracy_n,"
        "global_accuracy_difference,global_accuracy_low,global_accuracy_high,bytes_up_mean,bytes_up_std,bytes_up_n",
        "fedavg,0 1,0.625,0.1767766952966369,2,,,,0.3125,0.08838834764831845,2,,,,1000000.0,0.0,2",
    ]
    _, row = csv.DictReader(io.StringIO(text))
    assert row["method"] == HARD
    assert (row["local_accuracy_mean"], row["local_accuracy_difference"]) == ("0.5", "-0.125")
    assert float(row["local_accuracy_low"]) < -0.125 < float(row["local_accuracy_high"])
    # One seed has a value on both sides: a difference without an interval.
    assert (row["global_accuracy_n"], row["global_accuracy_difference"]) == ("1", "-0.125")
    assert (row["global_accuracy_std"], row["global_accuracy_low"]) == ("", "")


def test_markdown_is_this_text() -> None:
    name = r"\[a\]\_b\\c {d} \$e\$ \#f \~g ^h \<i\> a&amp;b\|c\*d \`e\` 10%, " + '"q" -1.5'
    assert markdown_text(example(), NAMES) == (
        "last round, mean ± std over 2 seeds; MB = 10^6 bytes, all clients\n"
        "\n"
        "| method | local accuracy % | global accuracy % | MB up /round |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| fedavg | 62.50 ± 17.68 | 31.25 ± 8.84 | 1.00 |\n"
        f"| {name} | 50.00 ± 0.00 | 25.00 (1 of 2 seeds) | 1.00 |\n"
        "\n"
        "difference to fedavg in points\n"
        "\n"
        "| method | local accuracy mean \\[95 % interval\\] | global accuracy mean \\[95 % interval\\] |\n"
        "| --- | ---: | ---: |\n"
        f"| {name} | -12.50 \\[-171.33, +146.33\\] | -12.50 (1 of 2 seeds) |\n"
    )


def test_latex_is_this_text() -> None:
    name = (
        r"{}[a]\_b\textbackslash{}c \{d\} \$e\$ \#f \textasciitilde{}g \textasciicircum{}h "
        r"\textless{}i\textgreater{} a\&b|c*d `e` 10\%, " + '"q" $-$1.5'
    )
    assert latex_text(example(), NAMES) == (
        "% \\usepackage{booktabs}\n"
        "\\begin{table}\n"
        "\\centering\n"
        "\\caption{last round, mean $\\pm$ std over 2 seeds; MB = 10\\textasciicircum{}6 bytes, all clients.}\n"
        "\\begin{tabular}{lrrr}\n"
        "\\toprule\n"
        "method & local accuracy \\% & global accuracy \\% & MB up /round \\\\\n"
        "\\midrule\n"
        "fedavg & 62.50 $\\pm$ 17.68 & 31.25 $\\pm$ 8.84 & 1.00 \\\\\n"
        f"{name} & 50.00 $\\pm$ 0.00 & 25.00 (1 of 2 seeds) & 1.00 \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
        "\\end{table}\n"
        "\\begin{table}\n"
        "\\centering\n"
        "\\caption{difference to fedavg in points.}\n"
        "\\begin{tabular}{lrr}\n"
        "\\toprule\n"
        "method & local accuracy mean [95 \\% interval] & global accuracy mean [95 \\% interval] \\\\\n"
        "\\midrule\n"
        f"{name} & $-$12.50 [$-$171.33, +146.33] & $-$12.50 (1 of 2 seeds) \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
        "\\end{table}\n"
    )


def test_latex_is_well_formed_and_means_the_same() -> None:
    nodes, _, length = LatexWalker(latex_text(example()), tolerant_parsing=False).get_latex_nodes()
    assert [node.environmentname for node in nodes if hasattr(node, "environmentname")] == ["table"] * 2
    assert length == len(latex_text(example()))
    for text in (HARD, "50.00 ± 1.00", "–", "[-1.50, +2.00]"):
        # The reader lacks these two of LaTeX's own, and writes the circumflex as an accent.
        read = latex_cell(text).replace(r"\textless{}", "<").replace(r"\textgreater{}", ">")
        assert LatexNodes2Text(math_mode="text").latex_to_text(read).replace("ˆ", "^") == text


def test_a_row_has_as_many_cells_as_the_table_has_columns() -> None:
    for line in markdown_text(example()).splitlines():
        if line.startswith("|"):
            cells = line.replace("\\|", "")
            assert cells.count("|") in (7, 4)
    assert markdown_cell("a\\b") == "a\\\\b"


def test_notes_follow() -> None:
    comparison = a_comparison(a_run())
    noted = Comparison({**comparison.config, "target": "local:85"}, {}, "", comparison.runs)
    note = "target: local accuracy 85 %; no run reaches it"
    assert markdown_text(noted).endswith(f"\n\n{note}\n")
    assert f"all clients. {note.replace('%', chr(92) + '%')}.}}" in latex_text(noted)


def test_unknown_columns_are_refused() -> None:
    for write in (csv_text, markdown_text, latex_text):
        with pytest.raises(ResultError, match="unknown column 'local'"):
            write(example(), ["local"])
