package controlplane

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// What the service manager is told.
const (
	notifyReady    = daemon.SdNotifyReady
	notifyStopping = daemon.SdNotifyStopping
	notifyAlive    = daemon.SdNotifyWatchdog
)

// notify tells the service manager, if there is one.
func notify(log *slog.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("service manager not told", "err", err)
	}
}

// watchdog feeds the service manager's watchdog as long as the store
// answers, until ctx ends.
func watchdog(ctx context.Context, log *slog.Logger, ready func(context.Context) error) error {
	every, err := daemon.SdWatchdogEnabled(false)
	if err != nil || every == 0 {
		return err
	}
	tick := time.NewTicker(every / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := ready(ctx); err != nil {
			log.Error("store takes no writes", "err", err)
			// A disk that is full is not mended by another start.
			if !errors.Is(err, store.ErrUnwritable) {
				continue
			}
		}
		notify(log, notifyAlive)
	}
}
