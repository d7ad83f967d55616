# The Debian packages. GOTAGS=TAG builds the variant for tests whose binaries
# are in bin/TAG and whose packages are in dist/TAG.

.PHONY: deb deb-all deb-noadopt

# Debian versions begin with a digit.
DEB_VERSION ?= 0.0.0+$(shell git rev-list --count HEAD 2>/dev/null || echo 0).g$(shell git rev-parse --short HEAD 2>/dev/null || echo 0)
DEB_ARCH ?= $(shell $(GO) env GOARCH)
DEB_BIN := bin$(addprefix /,$(GOTAGS))
DEB_DIST := dist$(addprefix /,$(GOTAGS))
export DEB_VERSION DEB_ARCH DEB_BIN

deb: $(TOOLS)/nfpm gpu-child ## build the Debian packages into dist/
	@mkdir -p $(DEB_DIST)
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=auto -tags '$(GOTAGS)' -o $(DEB_BIN)/ ./agent/cmd/millwrightd ./controlplane/cmd/millwright-server ./controlplane/cmd/millctl
	$(TOOLS)/nfpm package --packager deb --config packaging/nfpm/agent.yaml --target $(DEB_DIST)/millwright-agent.deb
	$(TOOLS)/nfpm package --packager deb --config packaging/nfpm/server.yaml --target $(DEB_DIST)/millwright-server.deb
	$(TOOLS)/nfpm package --packager deb --config packaging/nfpm/millctl.yaml --target $(DEB_DIST)/millwright-ctl.deb

deb-all: deb ## the packages and their variants for tests
	$(MAKE) --no-print-directory deb GOTAGS=millwright_crash
	$(MAKE) --no-print-directory deb GOTAGS=millwright_noadopt

deb-noadopt:
	$(MAKE) --no-print-directory deb GOTAGS=millwright_noadopt

ifeq ($(DEMO_BREAK),adopt)
demo demo-up: deb-noadopt
endif
