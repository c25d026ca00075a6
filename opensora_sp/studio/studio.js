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
}
