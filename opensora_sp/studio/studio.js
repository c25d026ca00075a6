() => {
  const banner = document.createElement("p");
  banner.id = "gone";
  banner.hidden = true;
  banner.setAttribute("role", "alert");
  banner.textContent =
    "The studio does not answer: it has ended, or the connection to it has. Start it again, and open the address that it prints.";
  document.body.prepend(banner);
  const show = (isGone) => () => { banner.hidden = !isGone; };
  setInterval(() => fetch("robots.txt").then(show(false), show(true)), 3000);
  // Plots of a unit show the same steps, also when Gradio builds one anew for a new value.
  const ranges = {};
  const follow = (plots) => {
    for (const plot of plots) {
      const range = ranges[plot.layout.meta];
      Plotly.relayout(plot, range ? {"xaxis.range": [...range]} : {"xaxis.autorange": true});
    }
  };
  new MutationObserver(() => {
    const plots = [...document.querySelectorAll(".js-plotly-plot")].filter((plot) => plot.on);
    const added = plots.filter((plot) => !plot.isKnown);
    for (const plot of added) {
      plot.isKnown = true;
      plot.on("plotly_relayout", (change) => {
        if (!Object.keys(change).some((key) => key.startsWith("xaxis"))) return;
        const unit = plot.layout.meta;
        const range = "xaxis.autorange" in change ? null : [...plot.layout.xaxis.range];
        // A plot that has followed another one says the range that the unit has.
        if (String(range) === String(ranges[unit])) return;
        ranges[unit] = range;
        follow(plots.filter((other) => other !== plot && other.layout.meta === unit));
      });
    }
    follow(added.filter((plot) => ranges[plot.layout.meta]));
  }).observe(document.body, {childList: true, subtree: true});
}
