"""Check a finished demo run; exits with status 1 if anything it should have learnt is missing."""

import argparse
import sys
from pathlib import Path

from opensora_sp.config import load_inference_config, load_train_config
from opensora_sp.console import report_errors
from opensora_sp.demo import check_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, help="the run's folder")
    parser.add_argument(
        "--sample-config", default="configs/demo/sample.py", help="sampling config of the model"
    )
    parser.add_argument(
        "--heldout", default="data/toy_heldout/clips.csv", help="manifest of clips not trained on"
    )
    args = parser.parse_args()
    with report_errors():
        train_cfg = load_train_config(args.run_dir / "config.py")
        findings = check_run(
            args.run_dir, train_cfg, load_inference_config(args.sample_config), args.heldout
        )
    for finding in findings:
        print(f"{'ok  ' if finding.ok else 'FAIL'} {finding.name}: {finding.detail}")
    sys.exit(0 if all(finding.ok for finding in findings) else 1)


if __name__ == "__main__":
    main()
