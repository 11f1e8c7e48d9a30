package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/gauge"
	"github.com/sluice-ml/sluice/service"
	"github.com/sluice-ml/sluice/service/access"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// stopTime is how long the service may take to put down what it has when it stops, once nobody calls any more.
const stopTime = 20 * time.Second

func serveCommand(stdout, stderr io.Writer) *cobra.Command {
	var (
		config, durability, logFormat, logLevel string
		noTCP                                   bool
		maxBytes                                = byteCap{byteSize: 8 << 30}
		options                                 service.Options
		door                                    access.Options
	)
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run the service that producers and trainers of many processes and machines share",
		Long: `Serve owns a state directory, with journals and tokens, and a store for samples, and answers on a unix socket and on 127.0.0.1:7447. With no flags it works on one machine and
needs nothing else. Everything survives a restart, also after a kill.

The socket is for this user; over TCP every call needs a token, see sluice token. An address that other hosts can reach needs TLS as well.

Each flag may be given as an environment variable instead (--max-bytes as SLUICE_MAX_BYTES), or by its name in a YAML file (--config); flags go before the environment, and that before
the file. SIGTERM or an interrupt stops in order, a second one at once. The exit status is 3 if another service has the state directory.`,
		Example: `  sluice serve
  sluice serve --max-bytes 64GiB --store /dev/shm/sluice --durability power
  sluice serve --listen 0.0.0.0:7447 --tls-self-signed --allow-host trainer-3
  sluice serve --state /tmp/mine --no-tcp --max-bytes none --exit-idle 10s --remove-state`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			defer service.AddProcessor()()
			log, err := newLog(stderr, logFormat, logLevel)
			if err != nil {
				return err
			}
			switch durability {
			case "process":
				options.Durability = dirstore.Process
			case "power":
				options.Durability = dirstore.Power
			default:
				return usageError{fmt.Errorf("--durability is %q, want process or power", durability)}
			}
			if strings.Contains(options.NATSURL, "@") {
				return &sluice.Error{Kind: sluice.Invalid, Op: "serve", Subject: "--nats-url", Detail: "holds a user or password, which every process of this host can read", Hint: "put them into a file for --nats-credentials"}
			}
			if noTCP {
				for _, name := range []string{"tls-cert", "tls-key", "tls-self-signed", "insecure-allow-plaintext-tcp"} {
					if f := cmd.Flags().Lookup(name); f.Value.String() != f.DefValue {
						return &sluice.Error{Kind: sluice.Invalid, Op: "serve", Subject: "--no-tcp", Detail: "leaves nothing that --" + name + " could be for", Hint: "give one of the two"}
					}
				}
				door.Listen = ""
			}
			if options.MaxBytes = int64(maxBytes.byteSize); maxBytes.none {
				options.MaxBytes = service.NoCap
			}
			options.Logger, door.Log = log, log
			options.Version, door.Version = version(), version()
			return serve(cmd.Context(), stdout, options, door)
		},
	}
	f := c.Flags()
	f.StringVar(&config, "config", "", "YAML `file` with settings by the names of the flags")
	f.StringVar(&options.StateDir, "state", "", "`directory` for journals, tokens and the socket (default $XDG_STATE_HOME/sluice or ~/.local/state/sluice)")
	f.StringVar(&door.Socket, "socket", "", "`path` of the unix socket, in a directory of this user's own (default sluice.sock in the state directory)")
	f.StringVar(&options.StoreDir, "store", "", "`directory` for samples (default in /dev/shm if that has room for twice --max-bytes, else in the state directory)")
	f.BoolVar(&options.AbandonSamples, "abandon-samples", false, "start with another store than the samples of the runs are in, and give those up")
	f.Var(&maxBytes, "max-bytes", "what the caps of all runs may add up to, a `size`; none bounds them by the machine's room alone")
	f.StringVar(&durability, "durability", "process", "what an answered call survives: the death of any `process`, or a power cut too (power)")
	f.StringVar(&options.NATSURL, "nats-url", "", "JetStream server to keep the journals on (default one in the process, in the state directory)")
	f.StringVar(&options.NATSCredentials, "nats-credentials", "", "`file` with the credentials for it")
	f.StringVar(&door.Listen, "listen", access.DefaultListen, "TCP `address`; port 0 takes a free one")
	f.BoolVar(&noTCP, "no-tcp", false, "answer on the unix socket alone")
	f.StringVar(&door.TLSCert, "tls-cert", "", "`file` with the certificate chain, PEM")
	f.StringVar(&door.TLSKey, "tls-key", "", "`file` with its key, PEM")
	f.BoolVar(&door.TLSSelfSigned, "tls-self-signed", false, "use a certificate of the service's own, made in the state directory; clients elsewhere need a copy of its tls-cert.pem")
	f.BoolVar(&door.InsecurePlaintext, "insecure-allow-plaintext-tcp", false, "let other hosts call without TLS: whoever is on the network reads tokens and samples, and can take both")
	f.StringSliceVar(&door.AllowHosts, "allow-host", nil, "`name` under which the service is called, beside localhost and its addresses (may be repeated)")
	f.IntVar(&door.Limits.Connections, "max-connections", 4096, "connections at once, on the socket and on TCP each")
	f.IntVar(&door.Limits.Calls, "max-calls", 512, "calls at once; uploads and downloads have as many beside, those that may wait and open streams four times as many each")
	f.DurationVar(&door.Limits.StopTime, "stop-time", 10*time.Second, "how long calls under way may take to end when the service stops")
	f.DurationVar(&options.ReservationTime, "reservation-time", 10*time.Minute, "how long a reservation lives without being used, and an uploaded sample without being committed, if their client process does not end before")
	f.DurationVar(&options.ExitIdle, "exit-idle", 0, "end when no client has held a session for so long (30 s at least before the first one); 0 is never")
	f.BoolVar(&options.RemoveState, "remove-state", false, "begin with nothing and leave nothing: state and store are removed at the end, and before the start what a killed service with this flag has left")
	f.StringVar(&logFormat, "log-format", "text", "text or json")
	f.StringVar(&logLevel, "log-level", "info", "debug, info, warn or error")
	f.StringVar((*string)(&options.Fault), "fault", "", "make a mistake now and then, for a torture that must find it")
	if err := f.MarkHidden("fault"); err != nil {
		panic(err) // the flag is defined a line above
	}
	c.PreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := settle(cmd.Flags(), &config); err != nil {
			return err
		}
		for _, name := range []string{"max-bytes", "max-connections", "max-calls", "stop-time", "reservation-time"} {
			if v := cmd.Flags().Lookup(name).Value.String(); strings.HasPrefix(v, "-") || v == "0" || v == "0s" {
				return &sluice.Error{Kind: sluice.Invalid, Op: "serve", Subject: "--" + name, Detail: "is " + v + ", want more than 0"}
			}
		}
		door.Limits.Moving, door.Limits.Waiting, door.Limits.Held = door.Limits.Calls, 4*door.Limits.Calls, 4*door.Limits.Calls
		return nil
	}
	return c
}

// settle gives the flags that are not on the command line their values from the environment, or else from the configuration file.
func settle(flags *pflag.FlagSet, config *string) error {
	env := func(name string) (variable, value string) {
		variable = "SLUICE_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
		return variable, os.Getenv(variable)
	}
	if _, file := env("config"); *config == "" {
		*config = file
	}
	values, err := readConfig(*config)
	if err != nil {
		return err
	}
	for name := range values {
		if f := flags.Lookup(name); f == nil || f.Hidden || name == "config" || name == "help" {
			return &sluice.Error{Kind: sluice.Invalid, Op: "config", Subject: *config, Detail: fmt.Sprintf("%q is no setting; settings have the names of the flags", name)}
		}
	}
	var errs []error
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed || f.Hidden || f.Name == "help" || f.Name == "config" {
			return
		}
		if variable, value := env(f.Name); value != "" {
			if err := flags.Set(f.Name, value); err != nil {
				errs = append(errs, &sluice.Error{Kind: sluice.Invalid, Op: "environment", Subject: variable, Err: err})
			}
			return
		}
		for _, value := range values[f.Name] {
			if err := flags.Set(f.Name, value); err != nil {
				errs = append(errs, &sluice.Error{Kind: sluice.Invalid, Op: "config", Subject: *config, Err: err})
			}
		}
	})
	return errors.Join(errs...)
}

// readConfig reads a YAML file of names with a value each, or a list of them.
func readConfig(path string) (map[string][]string, error) {
	if path == "" {
		return nil, nil
	}
	refuse := func(detail string, err error) (map[string][]string, error) {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "config", Subject: path, Detail: detail, Err: err}
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return refuse("", err)
	}
	var nodes map[string]yaml.Node
	if err := yaml.Unmarshal(data, &nodes); err != nil {
		return refuse("", err)
	}
	values := map[string][]string{}
	for name, n := range nodes {
		items := []*yaml.Node{&n}
		if n.Kind == yaml.SequenceNode {
			items = n.Content
		}
		for _, item := range items {
			if item.Kind != yaml.ScalarNode {
				return refuse(fmt.Sprintf("line %d: %s wants a value, or a list of them", item.Line, name), nil)
			}
			values[name] = append(values[name], item.Value)
		}
	}
	return values, nil
}

func newLog(w io.Writer, format, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, usageError{fmt.Errorf("--log-level is %q, want debug, info, warn or error", level)}
	}
	o := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, o)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return nil, usageError{fmt.Errorf("--log-format is %q, want text or json", format)}
}

// serve opens the service, then the door, and closes them in the other order when ctx ends, which is the regular end.
func serve(ctx context.Context, stdout io.Writer, o service.Options, door access.Options) (err error) {
	if door.StateDir, err = stateDir(o.StateDir); err != nil {
		return err
	}
	if door.Socket != "" {
		if door.Socket, err = filepath.Abs(door.Socket); err != nil {
			return &sluice.Error{Kind: sluice.Invalid, Op: "serve", Subject: "--socket", Err: err}
		}
	}
	if err := door.Check(); err != nil {
		return err
	}
	if o.ExitIdle > 0 {
		signal.Ignore(syscall.SIGPIPE) // whoever started it and reads what it says may be gone
	}
	s, err := service.Open(ctx, o)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
		defer cancel()
		err = errors.Join(err, s.Close(closing))
	}()
	door.StateDir = s.StateDir()
	d, err := access.Open(door)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if o.ExitIdle > 0 {
		go func() { // ends with ctx
			select {
			case <-s.Idle():
				o.Logger.Info("no client is left", "for", o.ExitIdle)
				stop()
			case <-ctx.Done():
			}
		}()
	}
	welcome(stdout, s, d, &o, &door)
	return d.Serve(ctx, s.Handler())
}

// welcome says what an operator needs to know, and how to try it.
func welcome(w io.Writer, s *service.Service, d *access.Door, o *service.Options, door *access.Options) {
	e := d.Endpoint()
	fmt.Fprintf(w, "sluice %s serves, pid %d\n", e.Version, e.PID)
	fmt.Fprintf(w, "  socket      %s, for this user\n", e.Socket)
	if e.URL == "" {
		fmt.Fprintf(w, "  address     none: --no-tcp\n")
	} else {
		fmt.Fprintf(w, "  address     %s, for who has a token: see `sluice token`\n", e.URL)
		fmt.Fprintf(w, "  dashboard   %s/\n", e.URL)
	}
	if e.CAFile != "" {
		fmt.Fprintf(w, "  certificate %s, for clients to trust\n", e.CAFile)
	}
	if door.InsecurePlaintext && e.URL != "" {
		fmt.Fprintf(w, "  WARNING     tokens and samples cross the network in the clear: --insecure-allow-plaintext-tcp\n")
	}
	fmt.Fprintf(w, "  state       %s\n", s.StateDir())
	fmt.Fprintf(w, "  store       %s: %s\n", s.StoreDir(), s.StoreReason())
	if o.MaxBytes == service.NoCap {
		fmt.Fprintf(w, "  caps        none of all runs together: --max-bytes none\n")
	} else {
		fmt.Fprintf(w, "  caps        of all runs together at most %s\n", gauge.Size(o.MaxBytes))
	}
	if o.RemoveState {
		fmt.Fprintf(w, "  private     state and store are removed at the end: --remove-state\n")
	}
	if o.Durability == dirstore.Power {
		fmt.Fprintf(w, "  durability  power: what was answered survives a power cut\n")
	} else {
		fmt.Fprintf(w, "  durability  process: what was answered survives the death of any process, not a power cut\n")
	}
	fmt.Fprintf(w, "  try         curl --unix-socket %s http://localhost/v1/status\n", e.Socket)
}
