"""JupyterHub's configuration for a class on one machine; the instructor's guide explains it."""

import os
import sys
from pathlib import Path

from jupyterhub.auth import PAMAuthenticator

c = get_config()  # noqa: F821  (JupyterHub provides it)

name = "sgd-to-ddp"
graders = ["instructor1", "instructor2"]
course = Path(os.environ["COURSE"])  # the clone with instructor/ and grading/
owner = (course / "nbgrader_config.py").owner()  # this account grades
port = int(os.environ.get("PORT", "8000"))  # and the three after it
settings = {
    "EXCHANGE": os.environ.get("EXCHANGE", "/usr/local/share/nbgrader/exchange"),
    "JUPYTER_CONFIG_PATH": str(Path(__file__).resolve().parent),  # everybody must be able to read
}

# Only this machine can connect. Let a web server with a certificate pass connections on.
c.JupyterHub.bind_url = f"http://127.0.0.1:{port}"
c.JupyterHub.hub_bind_url = f"http://127.0.0.1:{port + 1}"
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{port + 2}"


class Accounts(PAMAuthenticator):
    """Accounts are those of the machine (PAM). The hub does not start if a grader has none."""

    async def add_user(self, user):
        """Add a user of the hub: a grader of the list above, or who logs in."""
        if user.name in graders and not self.system_user_exists(user):
            sys.exit(
                f"this machine has no account {user.name}, which is one of the graders in "
                f"{__file__}: correct the list, or make the account (adduser {user.name})"
            )
        await super().add_user(user)


# Servers are processes of the accounts.
c.JupyterHub.authenticator_class = Accounts
c.JupyterHub.spawner_class = "jupyterhub.spawner.LocalProcessSpawner"
c.Authenticator.allow_all = True
# nbgrader knows a student by the name in the hub.
c.Spawner.environment = {**settings, "STUDENT": lambda spawner: spawner.user.name}
# If a whole class begins to work at once, a server may take minutes to start.
c.Spawner.start_timeout = c.Spawner.http_timeout = 300
# A kernel that nobody uses for an hour ends, and its ranks with it.
c.Spawner.args = ["--MappingKernelManager.cull_idle_timeout=3600"]

# One server for all graders, in the course's folder and as its owner. Formgrader is its first page:
# JupyterHub forbids frames, and the Formgrader panel in JupyterLab needs one.
c.JupyterHub.services = [
    {
        "name": name,
        "url": f"http://127.0.0.1:{port + 3}",
        "command": ["jupyterhub-singleuser"],
        "user": owner,
        "cwd": str(course),
        "environment": {**settings, "JUPYTERHUB_DEFAULT_URL": "/formgrader"},
        "timeout": 300,
        "oauth_no_confirm": True,
    }
]
c.JupyterHub.load_groups = {f"formgrade-{name}": {"users": graders}}
c.JupyterHub.load_roles = [
    {
        "name": f"formgrade-{name}",
        "groups": [f"formgrade-{name}"],
        "scopes": [f"access:services!service={name}"],
    }
]
