"""Names of series that are nobody's we know come from a file, which is refused if it is wrong."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from select_service.planner.edge.sources.prometheus import PrometheusSource
from select_service.planner.edge.sources.series_names import DYNAMO, SELECTOR, read_names
from select_service.planner.errors import SettingsError
from select_service.planner.types import ModelKey

ROOT = Path(__file__).parents[4]


def named(folder: Path, text: str) -> str:
    path = folder / "names.yaml"
    path.write_text(text)
    return str(path)


def test_known_names_need_no_file() -> None:
    assert read_names("dynamo") is DYNAMO
    assert read_names("selector") is SELECTOR


def test_what_a_file_does_not_name_is_as_it_was(tmp_path: Path) -> None:
    names = read_names(named(tmp_path, "isl: my_prompt_tokens\nmatchers: {dynamo_namespace: a}\n"))
    assert (names.isl, names.osl) == ("my_prompt_tokens", DYNAMO.osl)
    assert names.matchers == {"dynamo_namespace": "a"}
    names = read_names(named(tmp_path, "like: selector\nttft: ''\n"))
    assert (names.ttft, names.tenant_label) == ("", "tenant_id")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("like: vllm", "like: want dynamo or selector"),
        ("request: x", "unknown field `request`"),
        ("isl: 3", r"Expected `str`, got `int` - at `\$.isl`"),
        ("- isl", "Expected `object`, got `array`"),
        ("isl: [", "while parsing"),
        ("requests: ''", "requests is needed"),
        ("model_label: ''", "model_label is needed"),
        ("isl: my-tokens", "isl: 'my-tokens' is no name of a series"),
        ("isl: 'tokens{a=\"b\"}'", "isl: .* is no name of a series"),
        ("tenant_label: 'a:b'", "tenant_label: 'a:b' is no name"),
        ("matchers: {a-b: c}", "matchers: 'a-b' is no name of a label"),
        ("backlog_query: sum(x)", r"backlog_query has no \$match"),
    ],
)
def test_a_wrong_file_is_refused_by_its_field(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why) as refused:
        read_names(named(tmp_path, text))
    assert str(refused.value).startswith(str(tmp_path / "names.yaml"))


def test_the_example_of_the_documentation_is_right(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "docs" / "planner.md").read_text()
    example = text.partition("### Other names")[2].partition("```yaml\n")[2].partition("```")[0]
    names = read_names(named(tmp_path, example))
    assert (names.tenant_label, names.itl) == ("customer", DYNAMO.itl)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read_names(str(tmp_path / "none.yaml"))


async def test_further_labels_are_in_every_query(tmp_path: Path) -> None:
    """Two deployments of one model at one Prometheus were counted as one."""
    text = 'matchers: {dynamo_namespace: "a\\"b"}\nbacklog_query: "sum(waiting{$match})"\n'
    names = read_names(named(tmp_path, text))
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["query"])
        return httpx.Response(200, json={"status": "success", "data": {"result": []}})

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    source = PrometheusSource("http://p", names, client)
    await source.windows([ModelKey("m")], 180.0)
    await source.loads([ModelKey("m")])
    assert len(asked) == 11
    assert 'sum(waiting{model=~"(?i)m",dynamo_namespace="a\\"b"})' in asked
    for query in asked:
        assert query.count('dynamo_namespace="a\\"b"') == query.count("model=~")
