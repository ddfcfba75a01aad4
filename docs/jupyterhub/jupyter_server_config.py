"""The configuration of all servers on the hub; ``jupyterhub_config.py`` names this folder."""

c = get_config()  # noqa: F821  (Jupyter provides it)

# Under a hub, a terminal would be a login shell, which on many machines sets PATH anew: then it
# would not find `course` and `autograder`.
c.ServerApp.terminado_settings = {"shell_command": ["bash"]}
