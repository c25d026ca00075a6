"""Sample videos from a checkpoint, on any number of processes.

torchrun --nproc_per_node 3 scripts/inference.py configs/stdit3/inference/16x256x256.py --ckpt RUN --prompts FILE
"""

from opensora_sp.config import load_inference_config
from opensora_sp.console import add_allow_pickle, config_arguments, log_to_terminal, told_errors
from opensora_sp.sampling import read_prompts, sample


def main() -> None:
    parser = config_arguments("Sample a video for every prompt: mp4, contact sheet and a JSON beside each.")
    parser.add_argument("--ckpt", help="weights: a run's folder, a checkpoint, a Hugging Face folder, a file, ...")
    add_allow_pickle(parser)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeatable")
    parser.add_argument("--prompts", metavar="FILE", help=".txt with a prompt a line, or .csv with a column 'prompt'")
    parser.add_argument("--outputs", metavar="DIR", help="where to write; overrides the config")
    args = parser.parse_args()
    log_to_terminal()
    with told_errors():
        cfg = load_inference_config(args.config, args.cfg_options)
        given = [*args.prompt, *(read_prompts(args.prompts) if args.prompts else [])]
        changes = {"ckpt": args.ckpt, "prompts": given, "outputs": args.outputs}
        changes["allow_pickle"] = args.allow_pickle
        sample(cfg.model_copy(update={key: value for key, value in changes.items() if value}))


if __name__ == "__main__":
    main()
