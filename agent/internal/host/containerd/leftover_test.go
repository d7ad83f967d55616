package containerd

import "testing"

func TestLeftOver(t *testing.T) {
	const dir = "/run/containerd/io.containerd.runtime.v2.task/millwright/box"
	for text, want := range map[string]string{
		"make its process: failed to start shim: mkdir " + dir + ": file exists":                                    dir,
		"failed to start shim: mkdir /srv/state/io.containerd.runtime.v2.task/millwright/box: file exists: unknown": "/srv/state/io.containerd.runtime.v2.task/millwright/box",
		"failed to start shim: mkdir /run/containerd/io.containerd.runtime.v2.task/k8s.io/box: file exists":         "",
		"failed to start shim: mkdir /run/containerd/io.containerd.runtime.v2.task/millwright/other: file exists":   "",
		"mkdir /run/containerd/io.containerd.runtime.v2.task/millwright/../millwright/box: file exists":             "",
		"mkdir /var/lib/millwright/box: file exists":                                                                "",
		"mkdir " + dir + ": permission denied":                                                                      "",
		"task box: already exists":                                                                                  "",
	} {
		if got := leftOver("box", text); got != want {
			t.Errorf("leftOver(%q) = %q, want %q", text, got, want)
		}
	}
}
