from pathlib import Path

from diptych_testkit.markers import MARKER, leaks


def test_a_marked_word_in_a_log_is_found_and_elsewhere_it_is_none(tmp_path: Path) -> None:
    (tmp_path / "stack").mkdir()
    log = tmp_path / "stack/gateway-1.log"
    log.write_text(f"good\nsaid {MARKER} aloud\n")
    (tmp_path / "stack/body.json").write_text(MARKER)
    assert list(leaks(tmp_path)) == [(log, f"said {MARKER} aloud")]
