"""`python -m mha_deploy` is `mha-deploy`."""

from mha_deploy.cli import main

main(prog_name="mha-deploy")
