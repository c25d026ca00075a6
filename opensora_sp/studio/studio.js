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
  let isFollowing = false;
  const follow = async (plots) => {
    isFollowing = true;
    for (const plot of plots) {
      const range = ranges[plot.layout.meta];
      await Plotly.relayout(plot, range ? {"xaxis.range": [...range]} : {"xaxis.autorange": true});
    }
    isFollowing = false;
  };
  new MutationObserver(() => {
    const plots = [...document.querySelectorAll(".js-plotly-plot")].filter((plot) => plot.on);
    const added = plots.filter((plot) => !plot.isKnown);
    for (const plot of added) {
      plot.isKnown = true;
      plot.on("plotly_relayout", (change) => {
        if (isFollowing || !Object.keys(change).some((key) => key.startsWith("xaxis"))) return;
        const unit = plot.layout.meta;
        ranges[unit] = "xaxis.autorange" in change ? null : plot.layout.xaxis.range;
        follow(plots.filter((other) => other !== plot && other.layout.meta === unit));
      });
    }
    follow(added.filter((plot) => ranges[plot.layout.meta]));
  }).observe(document.body, {childList: true, subtree: true});
}
