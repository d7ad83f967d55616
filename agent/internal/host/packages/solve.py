# Asks dnf, by its own interface, what it would do. Nothing is fetched or changed.
# The argument is the question as JSON; the last line that is written is the answer.
import json
import sys

import dnf
import dnf.exceptions
import hawkey


def package(p):
    return {"name": p.name, "version": p.evr, "architecture": p.arch}


def packages(found):
    return sorted((package(p) for p in found), key=lambda p: (p["name"], p["architecture"]))


def opened(ask):
    base = dnf.Base()
    base.conf.read()
    substitutions = base.conf.substitutions
    substitutions.update_from_etc("/", varsdir=base.conf.varsdir)
    if substitutions.get("releasever") is None:  # no package tells the release
        substitutions.pop("releasever", None)
    base.conf.cacheonly = True
    base.conf.best = True
    base.conf.install_weak_deps = False
    base.conf.clean_requirements_on_remove = False
    base.init_plugins()
    base.pre_configure_plugins()
    base.read_all_repos()
    base.configure_plugins()
    base.fill_sack(load_available_repos=not ask.get("remove"))
    return base


def offered(base, name, ask, **how):
    return base.sack.query(**how).available().filter(name=name, arch=ask["architectures"])


def choose(base, want, ask):
    """Returns the package of a source that is wanted, or the one that is there."""
    def fit(p):
        return (want["version"] in ("", p.evr)
                and want["architecture"] in ("", p.arch))
    there = base.sack.query().installed().filter(name=want["name"])
    found = sorted((p for p in [*there, *offered(base, want["name"], ask)] if fit(p)), reverse=True)
    if found:
        return found[0]
    asked = " ".join(filter(None, (want["name"], want["version"], want["architecture"])))
    hidden = [p for p in offered(base, want["name"], ask, flags=hawkey.IGNORE_EXCLUDES) if fit(p)]
    if hidden:
        raise dnf.exceptions.MarkingError(
            asked + " is offered and excluded, by dnf versionlock, a module or excludepkgs")
    raise dnf.exceptions.MarkingError("no repository has " + asked)


def versions(base, ask):
    found = sorted(offered(base, ask["name"], ask, flags=hawkey.IGNORE_EXCLUDES), reverse=True)
    return {"versions": list(dict.fromkeys(p.evr for p in found))}


def change(base, ask):
    local = base.add_remote_rpms(ask.get("files") or [])
    for p in local:
        base.package_install(p)
    for want in ask.get("install") or []:
        p = choose(base, want, ask)
        if p.reponame != hawkey.SYSTEM_REPO_NAME:
            base.package_install(p)
    for name in ask.get("remove") or []:
        for p in base.sack.query().installed().filter(name=name):
            base.package_remove(p)
    base.resolve(allow_erasing=bool(ask.get("remove")))
    done = base.transaction
    brought, gone = (done.install_set, done.remove_set) if done else (set(), set())
    kept = {p.name for p in brought}
    return {
        "install": packages(p for p in brought if p.name not in {g.name for g in gone}),
        "replace": packages(g for g in gone if g.name in kept),
        "remove": packages(g for g in gone if g.name not in kept),
    }


def main():
    ask = json.loads(sys.argv[1])
    try:
        base = opened(ask)
        answer = versions(base, ask) if "name" in ask else change(base, ask)
    except dnf.exceptions.MarkingError as e:
        answer = {"missing": str(e)}
    except dnf.exceptions.RepoError as e:
        answer = {"repository": str(e)}
    except dnf.exceptions.DepsolveError as e:
        answer = {"problem": str(e)}
    except dnf.exceptions.Error as e:
        answer = {"error": str(e)}
    print(json.dumps(answer))


main()
