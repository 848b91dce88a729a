"""Prompt files: three forms of a row, the packaged sets, and one clear error for each bad input."""

from collections import Counter
from pathlib import Path

import pytest

from topo_search.errors import InputError
from topo_search.files.prompts import WORKLOADS, Prompt, packaged_prompts, read_prompts, select_prompts


def test_the_three_forms_of_a_row(tmp_path: Path) -> None:
    path = _written(
        tmp_path,
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "id": "a"}',
        '{"prompt": "Hello", "workload": "chat", "split": "evaluation"}',
        "",
        '{"text": "Once upon\\u2028a time ", "workload": "prose", "split": "calibration", "id": null}',
    )
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    assert read_prompts(path) == [
        Prompt(id="a", workload="default", split=None, messages=(system, user), text=None),
        Prompt(
            id="mine-2",
            workload="chat",
            split="evaluation",
            messages=({"role": "user", "content": "Hello"},),
            text=None,
        ),
        Prompt(id="mine-4", workload="prose", split="calibration", messages=None, text="Once upon\u2028a time "),
    ]


@pytest.mark.parametrize(
    "text", ['{"prompt": "a\u2028b"}', '\ufeff{"prompt": "a\u2028b"}\r\n', '{"prompt": "a\u2028b"}\n\n']
)
def test_only_a_newline_ends_a_row(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(text.encode())
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert prompt.messages == ({"role": "user", "content": "a\u2028b"},) and prompt.id == "p-1"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "input should be an object"),
        ('"hello"', "input should be an object"),
        ("{}", "must hold exactly one of messages, prompt and text, not none"),
        ('{"workload": "code"}', "must hold exactly one of messages, prompt and text, not none"),
        ('{"prompt": "a", "text": "b"}', "exactly one of messages, prompt and text, not prompt and text"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "not messages and prompt"),
        ('{"prompt": "a", "prompt": "b"}', "key 'prompt' occurs twice"),
        ('{"prompt": ""}', "prompt: must not be empty"),
        ('{"prompt": " \\n"}', "prompt: must not be empty"),
        ('{"prompt": 3}', "prompt: input should be a valid string, found 3"),
        ('{"text": ""}', "text: must not be empty"),
        ('{"messages": []}', "messages: "),
        ('{"messages": "hello"}', "messages: "),
        ('{"messages": [{"role": "user", "content": ""}]}', "messages[0].content: must not be empty"),
        ('{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}', "messages[1].role is missing"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "messages[0].content: input should be a valid string"),
        ('{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "messages[0].name is no known key"),
        ('{"prompt": "a", "wokload": "code"}', "wokload is no known key"),
        ('{"prompt": "a", "split": "test"}', "split: input should be 'calibration' or 'evaluation', found 'test'"),
        ('{"prompt": "a", "id": ""}', "id: must not be empty"),
        ('{"prompt": "a", "id": 7}', "id: input should be a valid string"),
        ('{"prompt": "a", "id": "first"}', "id 'first' is already that of line 1"),
    ],
)
def test_a_bad_row_is_refused_with_file_line_and_rule(tmp_path: Path, row: str, message: str) -> None:
    path = _written(tmp_path, '{"prompt": "a", "id": "first"}', "", row)
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}, line 3") and message in str(caught.value)


def test_an_id_may_not_equal_a_default_one(tmp_path: Path) -> None:
    path = _written(tmp_path, '{"prompt": "a", "id": "mine-2"}', '{"prompt": "b"}')
    with pytest.raises(InputError, match="line 2: id 'mine-2' is already that of line 1"):
        read_prompts(path)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=r"p\.jsonl holds no prompt; a row is such as"):
        read_prompts(tmp_path / "p.jsonl")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(InputError, match=r"p\.jsonl is not UTF-8 text \(byte 15\)"):
        read_prompts(tmp_path / "p.jsonl")


def test_no_such_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no file .*p\.jsonl"):
        read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_each_packaged_workload_has_66_prompts_two_thirds_for_calibration(workload: str) -> None:
    prompts = packaged_prompts(workload=workload, split="all")
    assert Counter(prompt.split for prompt in prompts) == {"calibration": 44, "evaluation": 22}
    assert {prompt.workload for prompt in prompts} == {workload}
    assert all(prompt.messages and prompt.messages[-1]["role"] == "user" for prompt in prompts)
    calibration = packaged_prompts(workload=workload, split="calibration")
    evaluation = packaged_prompts(workload=workload, split="evaluation")
    assert calibration == [prompt for prompt in prompts if prompt.split == "calibration"]
    assert evaluation == [prompt for prompt in prompts if prompt.split == "evaluation"]


def test_all_packaged_prompts_are_distinct() -> None:
    prompts = packaged_prompts(workload=None, split="all")
    assert len({prompt.id for prompt in prompts}) == len({str(prompt.messages) for prompt in prompts}) == 264


def test_unknown_choices_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="no packaged workload 'prose'; choose one of chat, code, math, json"):
        packaged_prompts(workload="prose", split="all")
    with pytest.raises(InputError, match="no split 'test'; choose one of calibration, evaluation, all"):
        packaged_prompts(workload="code", split="test")


def test_own_prompts_are_selected_by_workload_and_split(tmp_path: Path) -> None:
    prompts = read_prompts(
        _written(tmp_path, '{"prompt": "a", "workload": "sql"}', '{"prompt": "b", "split": "evaluation"}')
    )
    assert select_prompts(prompts, None, "all") == prompts
    assert select_prompts(prompts, "sql", "all") == prompts[:1]
    assert select_prompts(prompts, None, "evaluation") == prompts[1:]
    with pytest.raises(InputError, match="No prompt has workload 'code'; found: default, sql"):
        select_prompts(prompts, "code", "all")
    with pytest.raises(InputError, match="No prompt has split 'calibration'; found: evaluation, no split"):
        select_prompts(prompts, None, "calibration")


def _written(folder: Path, *rows: str) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path
