package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/google/uuid"
)

// skipped is the site's drop-in under which systemd skips slurmd.
const skipped = "/run/systemd/system/slurmd.service.d/zz-site.conf"

// noMember takes the node out of its cluster by hand: a member's other tasks ask
// Slurm first.
const noMember = `left=$(ls ` + skipped + ` /etc/default/millwright-slurmd /etc/systemd/system/slurmd.service.d/90-millwright.conf 2>/dev/null || true)
if test -n "$left" || systemctl is-enabled -q slurmd || systemctl is-active -q slurmd; then
  rm -f $left; systemctl disable --now slurmd 2>/dev/null || true
  rmdir /etc/systemd/system/slurmd.service.d 2>/dev/null || true; systemctl daemon-reload
fi`

// slurmSite makes the node a cluster's controller, under a configuration of its
// own so that it can be a member too, and no member.
const slurmSite = noMember + `
mkdir -p /etc/site /var/lib/slurm/slurmctld /var/log/slurm
cat > /etc/site/slurm.conf <<EOF
ClusterName=site
SlurmctldHost=$(hostname)
SlurmUser=slurm
SlurmctldParameters=enable_configless
MaxNodeCount=4
TreeWidth=65533
SelectType=select/cons_tres
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
NodeSet=mw Feature=mw
PartitionName=all Nodes=mw Default=YES State=UP
EOF
chown -R slurm: /var/lib/slurm /var/log/slurm; systemctl is-enabled -q munge || systemctl enable -q munge; systemctl start munge
systemctl is-active -q site-slurmctld || systemd-run --unit=site-slurmctld --property=Restart=on-failure slurmctld -D -f /etc/site/slurm.conf
export SLURM_CONF=/etc/site/slurm.conf
for i in $(seq 300); do scontrol ping | grep -q 'is UP' && break; sleep 0.1; done
scontrol delete nodename=$(hostname) 2>/dev/null || true`

// member is the spec by which a node joins with features.
func member(features string) string {
	return "controllers: [localhost]\ndynamic: {features: [" + features + "]}\n"
}

// slurm are the kinds of Slurm.
func slurm() []story {
	facts := func(string) string {
		return `export SLURM_CONF=/etc/site/slurm.conf
echo node=$(sinfo -h -N -o %N | sort -u | wc -l) drained=$(sinfo -h -R -o %E | grep -c mw:) slurmd=$(systemctl is-active slurmd) enabled=$(systemctl is-enabled slurmd) \
 files=$(ls /etc/default/millwright-slurmd /etc/systemd/system/slurmd.service.d/90-millwright.conf 2>/dev/null | wc -l) \
 intent=$(millwrightd status | grep -c slurm:)`
	}
	prepare := func(string) string { return slurmSite }
	join := story{kind: "slurm.join", facts: facts, prepare: prepare, state: succeeded, spec: func(string) string { return member("mw") }}
	join.setup = func(ctx context.Context, t *trial) error { return noIntents(ctx, t, member("mw")) }
	joined := func(ctx context.Context, t *trial) error {
		if err := join.setup(ctx, t); err != nil {
			return err
		}
		return t.done(ctx, "slurm.join", join.spec(t.label))
	}
	broken := join
	broken.variant, broken.state, broken.reason, broken.undo = "that fails", failed, "SLURM_SKIPPED", complete
	broken.setup = func(ctx context.Context, t *trial) error {
		if err := join.setup(ctx, t); err != nil {
			return err
		}
		_, err := t.sh(ctx, "mkdir -p /run/systemd/system/slurmd.service.d; printf '[Unit]\\nConditionPathExists=/etc/absent\\n' > "+skipped+"; systemctl daemon-reload")
		return err
	}
	after := func(kind, spec string) story {
		return story{kind: kind, facts: facts, prepare: prepare, state: succeeded, setup: joined, spec: func(string) string { return spec }}
	}
	out := append([]story{join, broken, keyed(broken), packaged(join), packaged(broken), gated(facts, prepare, joined)}, afterJoin(after)...)
	for i := range out {
		out[i].slow = true
	}
	return out
}

// keyed is a join that brings the cluster's key and fails: the key that was is
// back, and munged runs with it. The controller here reads its key from the same
// munged, and so trusts the node with either.
func keyed(broken story) story {
	s := broken
	s.variant = "that brings a key, and fails"
	s.prepare = func(l string) string {
		return `systemctl stop munge; printf 'before %057d' 0 > /etc/munge/munge.key; chown munge: /etc/munge/munge.key; chmod 0400 /etc/munge/munge.key
` + broken.prepare(l)
	}
	s.setup = func(ctx context.Context, t *trial) error {
		if err := broken.setup(ctx, t); err != nil {
			return err
		}
		_, err := t.operator(ctx, strings.Repeat("key of "+t.label+" ", 4), "secret", "put", t.label, "-f", "-")
		return err
	}
	s.spec = func(l string) string { return broken.spec(l) + "munge_key: {name: " + l + "}\n" }
	s.facts = func(l string) string {
		return broken.facts(l) + `
k=/etc/munge/munge.key; echo key=$(stat -c %a:%U:%G $k) before=$(grep -c before $k) new=$(grep -c "key of" $k) munge=$(systemctl is-active munge) \
 works=$(munge -n | unmunge | grep -c Success) kept=$(ls -A /var/lib/millwright/secrets 2>/dev/null | wc -l)`
	}
	return s
}

// sitePackages is a source of the site's with two packages, of which one was left
// half installed by a dpkg that was interrupted.
const sitePackages = `rm -rf /opt/site; mkdir -p /opt/site; cd /opt/site
for p in site-%[1]s half-%[1]s; do
  mkdir -p /run/%[1]s/$p/DEBIAN /run/%[1]s/$p/etc; echo setting > /run/%[1]s/$p/etc/$p.conf; echo /etc/$p.conf > /run/%[1]s/$p/DEBIAN/conffiles
  printf 'Package: %%s\nVersion: 1.0\nArchitecture: all\nMaintainer: site <site@example.org>\nDescription: site\n' $p > /run/%[1]s/$p/DEBIAN/control
  dpkg-deb -Znone --root-owner-group --build /run/%[1]s/$p $p.deb >/dev/null
  { dpkg-deb --field $p.deb; printf 'Filename: ./%%s\nSize: %%s\nSHA256: %%s\n\n' $p.deb $(stat -c %%s $p.deb) $(sha256sum $p.deb | cut -d' ' -f1); } >> Packages
done
echo 'deb [trusted=yes] file:/opt/site ./' > /etc/apt/sources.list.d/site.list
apt-get update -qq -oDir::Etc::sourcelist=/etc/apt/sources.list.d/site.list -oDir::Etc::sourceparts=-
dpkg --unpack half-%[1]s.deb >/dev/null; cd /
`

// packaged is a join that brings a package, on a node whose last dpkg was
// interrupted: what that left is finished first, and stays so.
func packaged(s story) story {
	if s.variant != "" {
		s.variant = ", and fails"
	}
	s.variant = "that brings packages" + s.variant
	s.loses = "unfinished"
	join := s
	s.prepare = func(l string) string {
		return fmt.Sprintf(sitePackages, strings.ToLower(l)) + join.prepare(l)
	}
	s.spec = func(l string) string {
		return join.spec(l) + "packages: [{name: site-" + strings.ToLower(l) + ", version: '1.0'}]\n"
	}
	s.facts = func(l string) string {
		return join.facts(l) + fmt.Sprintf(`
echo site=$(dpkg-query --show --showformat='${db:Status-Abbrev}' site-%[1]s 2>/dev/null) file=$(ls /etc/site-%[1]s.conf 2>/dev/null | wc -l) left=$(ls -d /usr/sbin/policy-rc.d 2>/dev/null | wc -l) audit=$(dpkg --audit | grep -c site-) \
 half=$(dpkg-query --show --showformat='${db:Status-Abbrev}' half-%[1]s | grep -q iU && echo unfinished)`, strings.ToLower(l))
	}
	return s
}

// afterJoin are the stories of a node that is a member.
func afterJoin(after func(kind, spec string) story) []story {
	resume := after("slurm.resume", "{}")
	joined := resume.setup
	resume.setup = func(ctx context.Context, t *trial) error {
		if err := joined(ctx, t); err != nil {
			return err
		}
		return t.done(ctx, "slurm.drain", "reason: a story\n")
	}
	other := "node:\n  " + strings.ReplaceAll(strings.TrimSpace(member("mw, fast")), "\n", "\n  ") + "\n"
	return []story{after("slurm.leave", "{}"), after("slurm.reconfigure", other), after("slurm.drain", "reason: a story\n"), resume}
}

// gated is storage.unmount while a job runs: the task waits for it, drained, and
// gives the node back. The job notes when its mount is gone too early.
func gated(facts, prepare func(string) string, joined func(context.Context, *trial) error) story {
	s := story{kind: "storage.unmount", variant: "while a job of Slurm runs", state: succeeded}
	s.prepare = func(l string) string {
		return prepare(l) + "; mkdir -p /srv/" + l + "; touch /srv/" + l + "/here"
	}
	s.spec = func(l string) string { return "target: /mnt/" + l + "/data\nwait_for_jobs: 60s\n" }
	s.facts = func(l string) string {
		return mountFacts(l) + "; " + facts(l) + " lost=$(cat /run/lost-" + l + " 2>/dev/null | wc -l)"
	}
	s.setup = func(ctx context.Context, t *trial) error {
		if err := joined(ctx, t); err != nil {
			return err
		}
		if err := t.done(ctx, "storage.mount", fmt.Sprintf("target: /mnt/%[1]s/data\nbind: {path: /srv/%[1]s}", t.label)); err != nil {
			return err
		}
		_, err := t.sh(ctx, fmt.Sprintf(`export SLURM_CONF=/etc/site/slurm.conf; sbatch --parsable -o /dev/null -D / --wrap 'touch /run/begun-%[1]s; until test -e /run/go-%[1]s; do test -e /mnt/%[1]s/data/here || echo lost >> /run/lost-%[1]s; sleep 0.05; done'`, t.label))
		if err != nil {
			return err
		}
		return t.await(ctx, "/run/begun-"+t.label)
	}
	s.create = func(ctx context.Context, t *trial) (string, error) {
		out, err := t.operator(ctx, t.story.spec(t.label), "task", "run", "storage.unmount", "-n", t.node.Name(), "-f", "-", "-o", "json",
			"--allow-impact", "drain", "--request-id", uuid.NewString())
		return created(out, err)
	}
	s.during = func(ctx context.Context, t *trial) error {
		_, err := t.sh(ctx, `export SLURM_CONF=/etc/site/slurm.conf; for i in $(seq 100); do sinfo -h -R -o %E | grep -q '^mw:storage.unmount-' && break; sleep 0.05; done; sleep 1; touch /run/go-`+t.label)
		return err
	}
	return s
}

// noIntents takes back what the stories before have left the node to restore: it
// would do so in the middle of this one.
func noIntents(ctx context.Context, t *trial, join string) error {
	keys, err := t.sh(ctx, "millwrightd status | grep -o 'slurm:[a-z]*' | sort -u")
	if err != nil {
		return err
	}
	if strings.Contains(keys, "slurm:drain") {
		if err := t.done(ctx, "slurm.join", join); err != nil {
			return err
		}
		if err := t.done(ctx, "slurm.resume", "{}"); err != nil {
			return err
		}
		keys += " slurm:member"
	}
	if strings.Contains(keys, "slurm:member") {
		return t.done(ctx, "slurm.leave", "{}")
	}
	return nil
}
